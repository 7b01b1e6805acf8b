"""The flags of `llmbackend serve`, in groups.

For: the command line. Does not know: what is done with them. Invariant: names and defaults are Triton's where Triton
has the flag; a wrong value ends with a message that names its flag.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from llmbackend.core.messages import ServerOptions
from llmbackend.core.metrics.metrics_options import MetricsOptions, with_metrics_config
from llmbackend.frontends.doors.exposure import is_loopback
from llmbackend.frontends.doors.rate_limit import Limits
from llmbackend.frontends.doors.restrictions import parse_restrictions
from llmbackend.frontends.doors.settings import DoorSettings
from llmbackend.frontends.doors.tls import TlsFiles

from .flag_types import boolean
from .flag_types import switch as _switch
from .log_format import LOG_FORMATS
from .server_log import LogSettings
from .settings import Endpoint
from .single_model import SingleModel


def _port(help_text: str) -> Any:
    return typer.Option(min=0, max=65535, help=f"{help_text}; 0 picks a free one.")


@dataclass(frozen=True)
class ModelFlags:
    """Which models are served, and how they come up."""

    PANEL: ClassVar = "Models"

    model_repository: Annotated[
        list[Path] | None,
        typer.Option("--model-repository", "--model-store", help="Directory of models; repeatable."),
    ] = None
    model: Annotated[
        str, typer.Option(help="Serve one checkpoint directory or hub id, with no repository (see --model-name).")
    ] = ""
    model_name: Annotated[
        str,
        typer.Option(
            "--model-name", "--served-model-name", help="The name that --model is served as; default: its last part."
        ),
    ] = ""
    model_control_mode: Annotated[str, typer.Option(help="none, poll or explicit.")] = "none"
    repository_poll_secs: Annotated[float, typer.Option(min=0, help="Mode poll: seconds between looks; 0 = none.")] = (
        15.0
    )
    load_model: Annotated[
        list[str] | None,
        typer.Option("--load-model", help="Model to load at start in explicit mode; repeatable, or *."),
    ] = None
    model_load_thread_count: Annotated[int, typer.Option(min=1, help="Models loaded at once.")] = 4
    model_load_retry_count: Annotated[int, typer.Option(min=0, help="Retries of a failed load.")] = 0
    model_namespacing: Annotated[
        Any, _switch("--model-namespacing", "The same name may be in several repositories.")
    ] = False
    model_config_name: Annotated[
        str | None, typer.Option(help="Use configs/<name>.pbtxt of a model that has it, instead of config.pbtxt.")
    ] = None
    disable_auto_complete_config: Annotated[
        bool, typer.Option("--disable-auto-complete-config", help="Backends may not complete config.pbtxt.")
    ] = False
    strict_model_config: Annotated[
        Any, typer.Option("--strict-model-config", parser=boolean, metavar="BOOL", help="Deprecated.", hidden=True)
    ] = None
    backend_directory: Annotated[Path | None, typer.Option(help="Where <name>/ directories of backends are.")] = None
    backend_config: Annotated[
        list[str] | None, typer.Option("--backend-config", help="<backend>,<key>=<value> or <key>=<value>; repeatable.")
    ] = None
    min_supported_compute_capability: Annotated[
        float, typer.Option(help="Given to backends, as their setting min-compute-capability.")
    ] = 6.0
    repoagent_directory: Annotated[
        Path | None, typer.Option(help="Where <name>/ directories of repository agents are; bundled ones come after.")
    ] = None

    @property
    def auto_complete_config(self) -> bool:
        return not (self.disable_auto_complete_config or self.strict_model_config)

    def warnings(self) -> tuple[str, ...]:
        """What is said of deprecated flags that were given."""
        if self.strict_model_config is None:
            return ()
        return ("'--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead.",)

    def repositories(self, single: SingleModel | None) -> list[Path]:
        """The repositories to serve; one is made for `--model`."""
        found = list(self.model_repository or ())
        for directory in found:
            _check_repository(directory)
        if single is not None:
            found.append(single.make_repository())
        if not found:
            raise typer.BadParameter("nothing to serve: give --model-repository DIR, or --model DIR for one checkpoint")
        return found


@dataclass(frozen=True)
class LifeFlags:
    """The server's name, and how it starts and ends."""

    PANEL: ClassVar = "Server"

    server_id: Annotated[str, typer.Option("--id", help="The server's name in its metadata.")] = "triton"
    exit_timeout_secs: Annotated[int, typer.Option(min=0, help="Seconds that running requests get at shutdown.")] = 30
    exit_on_error: Annotated[Any, _switch("--exit-on-error", "Exit when a startup model fails.")] = True
    strict_readiness: Annotated[Any, _switch("--strict-readiness", "Ready only if every model is.")] = True


_REUSE = "Several servers may listen on the port, if each has this flag."


@dataclass(frozen=True)
class HttpFlags:
    PANEL: ClassVar = "HTTP"

    allow_http: Annotated[Any, _switch("--allow-http", "Serve HTTP: KServe v2, generate, OpenAI.")] = True
    http_address: Annotated[str, typer.Option(help="Address of HTTP.")] = "0.0.0.0"
    http_port: Annotated[int, _port("Port of HTTP")] = 8000
    reuse_http_port: Annotated[Any, _switch("--reuse-http-port", _REUSE)] = False
    http_max_input_size: Annotated[int, typer.Option(min=1, help="Largest request body, bytes.")] = 64 << 20
    openai_max_input_size: Annotated[int, typer.Option(min=1, help="The same for /v1 alone, bytes.")] = 4 << 20

    def endpoint(self) -> Endpoint:
        return Endpoint(self.http_address, self.http_port, self.allow_http, self.reuse_http_port)


@dataclass(frozen=True)
class GrpcFlags:
    PANEL: ClassVar = "gRPC"

    allow_grpc: Annotated[Any, _switch("--allow-grpc", "Serve gRPC.")] = True
    grpc_address: Annotated[str, typer.Option(help="Address of gRPC.")] = "0.0.0.0"
    grpc_port: Annotated[int, _port("Port of gRPC")] = 8001

    def endpoint(self) -> Endpoint:
        return Endpoint(self.grpc_address, self.grpc_port, self.allow_grpc)


@dataclass(frozen=True)
class MetricsFlags:
    PANEL: ClassVar = "Metrics"

    allow_metrics: Annotated[Any, _switch("--allow-metrics", "Serve Prometheus metrics.")] = True
    metrics_address: Annotated[str, typer.Option(help="Address of metrics; default: that of HTTP.")] = ""
    metrics_port: Annotated[int, _port("Port of metrics")] = 8002

    def endpoint(self, default_address: str) -> Endpoint:
        address = self.metrics_address or default_address
        return Endpoint(address, self.metrics_port, self.allow_metrics)


@dataclass(frozen=True)
class MetricsConfigFlags:
    """Which metrics there are."""

    PANEL: ClassVar = "Metrics"

    metrics_config: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics-config",
            help="counter_latencies=BOOL, histogram_latencies=BOOL, summary_latencies=BOOL or "
            "summary_quantiles=Q:ERROR,Q:ERROR; repeatable.",
        ),
    ] = None
    metrics_interval_ms: Annotated[int, typer.Option(min=1, help="How old the metrics of the machine may be.")] = 2000
    allow_cpu_metrics: Annotated[Any, _switch("--allow-cpu-metrics", "Metrics of the machine's CPU and memory.")] = True

    def options(self) -> MetricsOptions:
        options = MetricsOptions(interval_ms=self.metrics_interval_ms, cpu_metrics=self.allow_cpu_metrics)
        try:
            return with_metrics_config(options, self.metrics_config or ())
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True)
class SharedMemoryFlags:
    """Whether clients may have the server read and write shared memory."""

    PANEL: ClassVar = "Shared memory"

    allow_client_shm: Annotated[
        Any, _switch("--allow-client-shm", "Clients may register shared memory; default: if only loopback is served.")
    ] = None

    def allowed(self, *endpoints: Endpoint) -> bool:
        """What the flag says; without it, whether nobody but this machine can reach the `endpoints`."""
        if self.allow_client_shm is not None:
            return bool(self.allow_client_shm)
        return all(is_loopback(endpoint.address) for endpoint in endpoints if endpoint.enabled)


@dataclass(frozen=True)
class DoorFlags:
    """Who may enter (docs/security.md)."""

    PANEL: ClassVar = "Keys, TLS, restrictions"

    api_key: Annotated[list[str] | None, typer.Option("--api-key", help="A key that opens the server; repeatable.")] = (
        None
    )
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of name:key [role=operator] [rpm=N] [tpm=N] [concurrency=N] lines; read again."),
    ] = None
    api_key_rpm: Annotated[int, typer.Option(min=0, help="Prompts per minute of a key; 0 = no limit.")] = 0
    api_key_tpm: Annotated[int, typer.Option(min=0, help="Tokens per minute of a key; 0 = no limit.")] = 0
    api_key_max_concurrent_requests: Annotated[
        int, typer.Option(min=0, help="Inferences of a key at once; 0 = its share, so that no key takes all.")
    ] = 0
    share_caches_between_api_keys: Annotated[
        Any, _switch("--share-caches-between-api-keys", "A key finds prefixes and responses computed for others.")
    ] = False
    http_restricted_api: Annotated[
        list[str] | None,
        typer.Option("--http-restricted-api", help="<api>,<api>:<header>=<value>; repeatable."),
    ] = None
    grpc_restricted_protocol: Annotated[
        list[str] | None,
        typer.Option("--grpc-restricted-protocol", help="<protocol>,<protocol>:<key>=<value>; repeatable."),
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="HTTP: certificate (PEM); turns TLS on.")] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="HTTP: the certificate's key (PEM).")] = None
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="HTTP: what client certificates are checked against.")] = (
        None
    )
    ssl_cert_reqs: Annotated[
        int,
        typer.Option(min=0, max=2, help="HTTP: client certificates: 0 = not asked for, 1 = optional, 2 = required."),
    ] = 0
    grpc_use_ssl: Annotated[Any, _switch("--grpc-use-ssl", "gRPC: TLS.")] = False
    grpc_use_ssl_mutual: Annotated[Any, _switch("--grpc-use-ssl-mutual", "gRPC: TLS, clients need a certificate.")] = (
        False
    )
    grpc_server_cert: Annotated[Path | None, typer.Option(help="gRPC: certificate (PEM).")] = None
    grpc_server_key: Annotated[Path | None, typer.Option(help="gRPC: the certificate's key (PEM).")] = None
    grpc_root_cert: Annotated[Path | None, typer.Option(help="gRPC: what client certificates are checked against.")] = (
        None
    )
    log_requests: Annotated[
        Any, _switch("--log-requests", "Log method, path, status, key's name and time of each request.")
    ] = False

    def settings(self) -> DoorSettings:
        try:
            return DoorSettings(
                api_key_file=self.api_key_file,
                api_keys=tuple(self.api_key or ()),
                environment_keys=os.environ.pop("LLMBACKEND_API_KEYS", ""),  # engines and models need not see them
                default_limits=Limits(self.api_key_rpm, self.api_key_tpm, self.api_key_max_concurrent_requests),
                share_caches=self.share_caches_between_api_keys,
                http_restrictions=parse_restrictions(self.http_restricted_api or (), "api"),
                grpc_restrictions=parse_restrictions(self.grpc_restricted_protocol or (), "protocol"),
                http_tls=self._http_tls(),
                grpc_tls=self._grpc_tls(),
                log_requests=self.log_requests,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _http_tls(self) -> TlsFiles | None:
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            if self.ssl_ca_certs is not None or self.ssl_cert_reqs:
                raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile and --ssl-keyfile")
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise ValueError("--ssl-certfile and --ssl-keyfile go together")
        mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return TlsFiles.checked(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, mode)

    def _grpc_tls(self) -> TlsFiles | None:
        """As in Triton, mutual TLS implies TLS, and the files of a server without either are not looked at."""
        if not self.grpc_use_ssl and not self.grpc_use_ssl_mutual:
            return None
        if self.grpc_server_cert is None or self.grpc_server_key is None:
            raise ValueError("--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key")
        mode = ssl.CERT_REQUIRED if self.grpc_use_ssl_mutual else ssl.CERT_NONE
        return TlsFiles.checked(self.grpc_server_cert, self.grpc_server_key, self.grpc_root_cert, mode)


@dataclass(frozen=True)
class LogFlags:
    PANEL: ClassVar = "Log"

    log_verbose: Annotated[int, typer.Option(min=0, help="Debug lines from 1 on.")] = 0
    log_info: Annotated[Any, _switch("--log-info", "Log information.")] = True
    log_warning: Annotated[Any, _switch("--log-warning", "Log warnings.")] = True
    log_error: Annotated[Any, _switch("--log-error", "Log errors.")] = True
    log_format: Annotated[str, typer.Option(help="default or ISO8601.")] = "default"
    log_file: Annotated[str, typer.Option(help="File to which the log is appended; default: standard error.")] = ""

    def settings(self) -> LogSettings:
        if self.log_format not in LOG_FORMATS:
            raise bad_option("--log-format", "invalid argument for --log-format")
        return LogSettings(
            verbose=self.log_verbose,
            info=self.log_info,
            warning=self.log_warning,
            error=self.log_error,
            format=self.log_format,
            file=self.log_file,
        )


def server_options(
    models: ModelFlags, single: SingleModel | None, life: LifeFlags, metrics: MetricsOptions, allow_client_shm: bool
) -> ServerOptions:
    """What the host is told."""
    mode = models.model_control_mode.lower()
    if mode not in ("none", "poll", "explicit"):
        raise bad_option("--model-control-mode", "invalid argument for --model-control-mode")
    return ServerOptions(
        model_repositories=tuple(models.repositories(single)),
        server_id=life.server_id,
        model_control_mode=mode,  # type: ignore[arg-type]  # checked above
        repository_poll_secs=models.repository_poll_secs,
        startup_models=tuple(models.load_model or ()),
        backend_directory=models.backend_directory,
        backend_config=_backend_config(models),
        strict_readiness=life.strict_readiness,
        exit_on_error=life.exit_on_error,
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
        what = f"can not be read: {error.strerror}"
    expected = "give the directory that holds a directory for each model, or --model for one checkpoint"
    raise bad_option("--model-repository", f"'{directory}' {what}: {expected}")


def bad_option(flag: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=flag)


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
    """Raises typer.BadParameter for a name that was given and is empty."""
    if given == "":
        raise bad_option("--model-config-name", "empty argument for --model-config-name")
    return given or ""
