"""The flags of `llmbackend serve` for the host: models, repositories, start and end, response cache, rate limiter.

Invariant: names, defaults and refusals are Triton's if Triton has the flag; errors name the flag.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from llmbackend.core.metrics.metrics_options import MetricsOptions
from llmbackend.core.scheduling.rate_limiter import RateLimitResource
from llmbackend.core.server_options import ServerOptions
from llmbackend.demo import DEMO_REPOSITORY
from llmbackend.fork_server.host_policy import HostPolicy

from ...server.settings import SingleModel
from ..command_line import bad_option, boolean, one_of, switch

log = logging.getLogger(__name__)
MOST_FRONTENDS = 64

_SETTING_BEGINS = re.compile(r",(?=\w+=)")
"""A comma that precedes another setting, as opposed to one in a password."""


@dataclass(frozen=True)
class ModelFlags:
    PANEL: ClassVar = "Models"

    model_repository: Annotated[
        list[Path] | None,
        typer.Option("--model-repository", "--model-store", help="Directory of models; repeatable."),
    ] = None
    model_tag: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Like --model, on one port, as in vllm serve.", show_default=False),
    ] = ""
    model: Annotated[
        str,
        typer.Option(
            help="Serve one checkpoint (directory, GGUF file, hub id, name from `llmbackend models`) without a "
            "repository (--served-model-name)."
        ),
    ] = ""
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            "--model-name",
            help="The model's name for clients; repeatable, the first one is canonical. "
            "Default: MODEL as given, or the last part of --model.",
        ),
    ] = None
    demo: Annotated[
        bool, typer.Option(help="Serve the bundled model demo (default without a model or repository).")
    ] = False
    model_control_mode: Annotated[
        str, typer.Option(help="none, poll or explicit.", autocompletion=one_of("none", "poll", "explicit"))
    ] = "none"
    repository_poll_secs: Annotated[float, typer.Option(min=0, help="Mode poll: seconds between polls; 0 = none.")] = (
        15.0
    )
    load_model: Annotated[
        list[str] | None, typer.Option(help="Model to load at start in explicit mode, or *; repeatable.")
    ] = None
    model_load_thread_count: Annotated[int, typer.Option(min=1, help="Models loaded concurrently.")] = 4
    model_load_retry_count: Annotated[int, typer.Option(min=0, help="Retries of a failed load.")] = 0
    model_namespacing: Annotated[Any, switch("Allow the same model name in several repositories.")] = False
    model_config_name: Annotated[
        str | None, typer.Option(help="Use configs/<name>.pbtxt instead of config.pbtxt if a model has it.")
    ] = None
    disable_auto_complete_config: Annotated[bool, typer.Option(help="Do not let backends complete config.pbtxt.")] = (
        False
    )
    strict_model_config: Annotated[
        Any, typer.Option("--strict-model-config", parser=boolean, metavar="BOOL", help="Deprecated.", hidden=True)
    ] = None
    backend_directory: Annotated[Path | None, typer.Option(help="Directory with one subdirectory per backend.")] = None
    backend_config: Annotated[
        list[str] | None, typer.Option(help="<backend>,<key>=<value> or <key>=<value>; repeatable.")
    ] = None
    min_supported_compute_capability: Annotated[
        float, typer.Option(help="Passed to backends as min-compute-capability.")
    ] = 6.0
    repoagent_directory: Annotated[
        Path | None, typer.Option(help="Directory with one subdirectory per repository agent, besides bundled ones.")
    ] = None

    @property
    def auto_complete_config(self) -> bool:
        return not (self.disable_auto_complete_config or self.strict_model_config)

    def warnings(self) -> tuple[str, ...]:
        """One text for each deprecated flag that was set."""
        if self.strict_model_config is None:
            return ()
        return ("'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead.",)

    @property
    def checkpoint(self) -> str:
        """The only model, which is served without a repository; "" = none. Raises BadParameter."""
        if self.model_tag and self.model:
            raise bad_option("--model", f"the model is given twice: '{self.model_tag}' and --model '{self.model}'")
        found = self.model_tag or self.model
        if self.served_model_name and not found:
            raise bad_option("--served-model-name", "--served-model-name needs a model: MODEL or --model")
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served. Raises BadParameter."""
        names = tuple(dict.fromkeys(self.served_model_name or ()))
        for name in names:
            if not name.strip() or "," in name or not name.isprintable():
                expected = "expected printable characters without commas"
                raise bad_option("--served-model-name", f"--served-model-name is '{name}', {expected}")
        return names or ((self.model_tag,) if self.model_tag else ())

    def repositories(self, single: SingleModel | None, may_lack: bool) -> list[Path]:
        """The named repositories, that of --demo, and one for `--model`; by default that of the demo. may_lack: the
        server starts even if some are not directories."""
        found = list(self.model_repository or ())
        if self.demo or not (found or single):
            found.append(DEMO_REPOSITORY)
        for directory in () if may_lack else found:
            _check_repository(directory)
        if single is not None:
            found.append(single.make_repository())
        return found


@dataclass(frozen=True)
class ServerFlags:
    PANEL: ClassVar = "Server"

    server_id: Annotated[str, typer.Option("--id", help="The server's name in its metadata.")] = "triton"
    exit_timeout_secs: Annotated[
        int,
        typer.Option(
            "--exit-timeout-secs", "--shutdown-timeout", min=0, help="Seconds to finish running requests at shutdown."
        ),
    ] = 30
    frontend_processes: Annotated[
        int,
        typer.Option(
            "--frontend-processes",
            "--api-server-count",
            min=1,
            max=MOST_FRONTENDS,
            help="Number of processes for client connections; 1 = the server process itself.",
        ),
    ] = 1
    exit_on_error: Annotated[Any, switch("Exit when a startup model fails.")] = True
    strict_readiness: Annotated[Any, switch("Ready only if all models are.")] = True


@dataclass(frozen=True)
class SchedulingFlags:
    PANEL: ClassVar = "Scheduling and caches"

    cache_config: Annotated[
        list[str] | None,
        typer.Option(
            help="<cache>,<key>=<value>[,<key>=<value>…]: local,size=BYTES or redis,host=HOST,port=PORT; repeatable."
        ),
    ] = None
    cache_directory: Annotated[
        Path | None, typer.Option(help="Directory with one subdirectory per cache that is a shared library.")
    ] = None
    response_cache_byte_size: Annotated[
        int, typer.Option(min=0, help="Deprecated: --cache-config local,size=BYTES.")
    ] = 0
    rate_limit: Annotated[
        str, typer.Option(help="off, or execution_count: instances wait for resources by priority.")
    ] = "off"
    rate_limit_resource: Annotated[list[str] | None, typer.Option(help="<name>:<count>[:<device>]; repeatable.")] = None
    host_policy: Annotated[
        list[str] | None,
        typer.Option(
            help="<policy>,numa-node=<node> or <policy>,cpu-cores=<lower>-<upper>, for instances; repeatable."
        ),
    ] = None

    def applied_to(self, options: ServerOptions) -> ServerOptions:
        """Raises typer.BadParameter for an invalid value."""
        if self.rate_limit not in ("off", "execution_count"):
            raise typer.BadParameter(f"--rate-limit is '{self.rate_limit}', expected one of off, execution_count")
        return replace(
            options,
            cache_config=self._cache_config(),
            cache_directory=self.cache_directory,
            rate_limit=self.rate_limit,  # type: ignore[arg-type]  # checked above
            rate_limit_resources=tuple(_resource(text) for text in self.rate_limit_resource or ()),
            host_policies=_host_policies(self.host_policy or ()),
        )

    def _cache_config(self) -> dict[str, dict[str, str]]:
        if not self.response_cache_byte_size:
            return _cache_config(self.cache_config or ())
        if self.cache_config:
            raise typer.BadParameter(
                "Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide one or "
                "the other."
            )
        size = str(self.response_cache_byte_size)
        log.warning("'--response-cache-byte-size' has been deprecated, use '--cache-config=local,size=%s'", size)
        return {"local": {"size": size}}


def _cache_config(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Name → settings. A flag may contain several settings; Triton accepts one per flag."""
    config: dict[str, dict[str, str]] = {}
    for text in texts:
        name, comma, settings = text.partition(",")
        if not comma or not name:
            raise typer.BadParameter(
                f"No cache specified. --cache-config option format is <cache name>,<setting>=<value>. Got {text}"
            )
        for setting in _SETTING_BEGINS.split(settings):
            key, _, value = setting.partition("=")
            if not key or not value:
                raise typer.BadParameter(
                    f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {text}"
                )
            config.setdefault(name, {})[key] = value
    return config


def _host_policies(texts: Sequence[str]) -> dict[str, HostPolicy]:
    """The policies by name. Several flags may contribute to one policy."""
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        name, _, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not name or not key or not equals:
            raise bad_option("--host-policy", f"option format is '<policy_name>,<setting>=<value>'. Got {text}")
        settings.setdefault(name, {})[key] = value
    try:
        return {name: HostPolicy.of(values) for name, values in settings.items()}
    except ValueError as error:
        raise bad_option("--host-policy", str(error)) from None


def _resource(text: str) -> RateLimitResource:
    name, *numbers = text.split(":")
    if not name or len(numbers) not in (1, 2) or not all(_is_whole(number) for number in numbers):
        raise typer.BadParameter(
            f"--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
            f"Got {text}"
        )
    return RateLimitResource(name, *map(int, numbers))


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def server_options(
    models: ModelFlags, single: SingleModel | None, server: ServerFlags, metrics: MetricsOptions, allow_client_shm: bool
) -> ServerOptions:
    """The host's options. Raises BadParameter for an invalid value."""
    mode = models.model_control_mode.lower()
    if mode not in ("none", "poll", "explicit"):
        raise bad_option("--model-control-mode", "invalid argument for --model-control-mode")
    return ServerOptions(
        model_repositories=tuple(models.repositories(single, may_lack=not server.exit_on_error)),
        server_id=server.server_id,
        model_control_mode=mode,  # type: ignore[arg-type]  # checked above
        repository_poll_secs=models.repository_poll_secs,
        startup_models=tuple(models.load_model or ()),
        backend_directory=models.backend_directory,
        backend_config=_backend_config(models),
        strict_readiness=server.strict_readiness,
        exit_on_error=server.exit_on_error,
        model_load_thread_count=models.model_load_thread_count,
        model_load_retry_count=models.model_load_retry_count,
        auto_complete_config=models.auto_complete_config,
        model_config_name=_config_name(models.model_config_name),
        model_namespacing=models.model_namespacing,
        repoagent_directory=models.repoagent_directory,
        allow_client_shm=allow_client_shm,
        metrics=metrics,
    )


def _check_repository(directory: Path) -> None:
    try:
        if directory.is_dir():
            return
        what = "is no directory" if directory.exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    expected = "give the directory that holds a directory for each model, or --model for one checkpoint"
    raise bad_option("--model-repository", f"'{directory}' {what}: {expected}")


def _backend_config(models: ModelFlags) -> dict[str, dict[str, str]]:
    """`<backend>,<key>=<value>` or `<key>=<value>` (for every backend: key "")."""
    config: dict[str, dict[str, str]] = {
        "": {"min-compute-capability": f"{models.min_supported_compute_capability:.6f}"}
    }
    for item in models.backend_config or ():
        backend, comma, setting = item.partition(",")
        if not comma:
            backend, setting = "", item
        key, equals, value = setting.partition("=")
        if not equals or not key:
            expected = "expected <backend>,<key>=<value> or <key>=<value>"
            raise bad_option("--backend-config", f"'{item}', {expected}")
        config.setdefault(backend, {})[key] = value
    return config


def _config_name(given: str | None) -> str:
    """Raises typer.BadParameter for an empty name."""
    if given == "":
        raise bad_option("--model-config-name", "empty argument for --model-config-name")
    return given or ""
