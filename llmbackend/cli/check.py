"""`llmbackend check`: whether a model would load, how it would be computed, and how much memory it would take.

For people before `serve`, and for scripts. Invariants: exit code 0 = every model would load, 1 = at least one
would not, 2 = wrong usage, or the target holds no model; the host and the backend decide, by a dry load: the host loads
a model as `serve` does, but creates no instances, so no engine is started and no weights are read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from llmbackend.adapter.gguf_models import is_gguf_model
from llmbackend.core.config.model_config import CONFIG_FILE_NAME
from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import StartupError, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.metrics.nv_metrics import memory_bytes
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.generation.parsers import detect

from ..server.serve import reasons_with_flags
from ..server.start_failure import failure_summary
from .command_line import PlainHelpCommand, bad_option, takes_flag_groups
from .flags import vllm_environment
from .flags.engine import EngineFlags
from .models import go_offline, local_model
from .terminal_text import harmless, harmless_line

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_LOG = "llmbackend"
_MAX_WARNINGS = 50
_STOP_TIMEOUT_S = 5.0
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class CheckFlags:
    """What to check, and how to report it."""

    target: Annotated[
        str,
        typer.Argument(
            help="Checkpoint (directory, GGUF file, hub id, known model), model of a Triton repository, or repository."
        ),
    ]
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per model, on standard output.")] = False
    backend_directory: Annotated[Path | None, typer.Option(help="Same as for serve.")] = None
    model_config_name: Annotated[str, typer.Option(help="Same as for serve.")] = ""
    offline: Annotated[bool, typer.Option("--offline", help="Same as for serve.")] = False


@app.command(cls=PlainHelpCommand)
@takes_flag_groups
def check(context: typer.Context, flags: CheckFlags, engine: EngineFlags) -> None:
    """Check whether a model loads, how it is computed, and how much memory it takes. Reads no weights."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if flags.offline:
        go_offline()
    repository, names, flag_model = _models(local_model(flags.target), engine)
    options = ServerOptions(
        backend_directory=flags.backend_directory, model_config_name=flags.model_config_name, repository_poll_secs=0
    )
    findings = [finding for name in names for finding in _check_model(name, repository, options)]
    for finding in findings:
        reasons = reasons_with_flags(finding.reasons, flag_model)
        if flags.as_json:
            typer.echo(json.dumps(_as_object(finding, reasons)))
        else:
            _print_finding(finding, reasons)
    if any(finding.reasons for finding in findings):
        raise typer.Exit(1)


def _models(target: str, engine: EngineFlags) -> tuple[Path, list[str], str]:
    """Repository, the models in it, and the name of the model given by engine flags. Raises BadParameter."""
    path = Path(target)
    try:
        is_checkpoint = not path.is_dir() or (path / "config.json").is_file() or is_gguf_model(path)
        children = [] if is_checkpoint else list(path.resolve().iterdir())
    except OSError as error:
        raise bad_option("target", f"the target is '{target}', which cannot be read: {error.strerror}") from None
    if is_checkpoint:
        try:
            single = engine.with_defaults(vllm_environment.engine_arguments(os.environ)).model(target)
        except typer.BadParameter as error:
            raise _about_target(error) from None
        assert single is not None
        return single.make_repository(), [single.name], single.name
    engine.model("")  # refuses engine flags
    path = path.resolve()
    if _is_model(path):
        return path.parent, [path.name], ""
    names = sorted(child.name for child in children if _is_model(child))
    if not names:
        checkpoint = "a checkpoint (config.json or a GGUF file)"
        expected = f"{checkpoint}, a model of a repository (config.pbtxt, 1/), or a repository of such"
        raise bad_option("TARGET", f"'{target}' holds no model, expected {expected}")
    return path, names, ""


def _about_target(error: typer.BadParameter) -> typer.BadParameter:
    """An error about `--model`, which this command does not have."""
    if error.param_hint != "--model":
        return error
    return bad_option("target", error.message.replace("--model is", "the target is", 1))


def _is_model(path: Path) -> bool:
    """A folder that cannot be read, such as lost+found, is none."""
    try:
        if (path / CONFIG_FILE_NAME).is_file() or (path / "configs").is_dir():
            return True
        return any(child.is_dir() and child.name.isascii() and child.name.isdigit() for child in path.iterdir())
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Finding:
    """One model, or one of its versions."""

    name: str
    version: int = 0
    """0 = no version was reached."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why it would not load, by model, including an ensemble's parts; empty = it would."""
    forecast: Mapping[str, Any] = field(default_factory=dict)
    """The forecast of the backend."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The completed configuration as JSON."""
    warnings: tuple[str, ...] = ()
    """The warnings that `serve` would log."""


def _check_model(name: str, repository: Path, options: ServerOptions) -> list[Finding]:
    """One finding for each version that would be served, or one that says why none would. options: everything except
    which model is loaded, and from where."""
    options = replace(
        options,
        model_repositories=(repository,),
        model_control_mode="explicit",
        startup_models=(name,),
        starts_instances=False,
        exit_on_error=True,
    )
    with _warnings() as warnings:
        server = InferenceServer(options)
        try:
            server.start()
        except StartupError as error:
            return [Finding(name, reasons=error.reasons, warnings=tuple(warnings))]
        except TritonError as error:
            return [Finding(name, reasons={name: error.message}, warnings=tuple(warnings))]
        try:
            return [
                Finding(
                    name, version, {}, forecast, config_to_json(server.model_config(name, version)), tuple(warnings)
                )
                for (served, version), forecast in server.forecasts().items()
                if served == name
            ]
        finally:
            server.stop(_STOP_TIMEOUT_S)


class _Collector(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        if record.levelno == logging.WARNING and len(self._texts) < _MAX_WARNINGS and text not in self._texts:
            self._texts.append(text)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the warnings logged in this context; nothing reaches the log. Errors are in the findings' reasons."""
    texts: list[str] = []
    logger, handler = logging.getLogger(_LOG), _Collector(texts)
    logger.addHandler(handler)
    was_passed_on, logger.propagate = logger.propagate, False
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_passed_on


def _as_object(finding: Finding, reasons: Mapping[str, str]) -> dict[str, Any]:
    """The finding as one line of JSON."""
    found = dict(finding.forecast)
    if "chat_template" in found:
        found["tool_call_parser"], found["reasoning_parser"] = _parsers(finding)
    return {
        "name": finding.name,
        "version": finding.version,
        "would_load": not reasons,
        "reasons": dict(reasons),
        "warnings": list(finding.warnings),
        "forecast": found,
        "config": dict(finding.config),
    }


def _print_finding(finding: Finding, reasons: Mapping[str, str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if reasons:
        console.print(Text(f"{harmless_line(finding.name)}: would not load", "bold red"))
        console.print(Text(harmless(failure_summary(reasons, otherwise=""))))
    else:
        version = f" version {finding.version}" if finding.version else ""
        console.print(Text(f"{harmless_line(finding.name)}{version}: would load", "bold green"))
        rows = [(name, harmless_line(text)) for name, text in _rows(finding) if text]
        for name, text in rows:
            console.print(Text.assemble((f"  {name:15}", "dim"), text))
    for warning in finding.warnings:
        console.print(Text(f"  warning: {harmless_line(warning)}", "yellow"))


def _rows(finding: Finding) -> Iterator[tuple[str, str]]:
    yield "backend", str(finding.config.get("backend") or finding.config.get("platform") or "")
    engine = finding.forecast.get("engine")
    if engine is None:
        yield from _tensors(finding.config)
        return
    yield "checkpoint", str(finding.forecast.get("model", ""))
    yield "computed by", _path(engine, finding.forecast.get("num_engines", 1))
    yield "kernels", engine["kernels"]
    yield "weights", _weights(engine)
    yield "KV memory", _kv_memory(engine)
    yield "context", _context(engine)
    yield "this machine", _free_memory(engine)
    yield "packed weights", engine["weight_cache"]
    yield "tokenizer", finding.forecast.get("tokenizer", "none: requests bring token ids")
    yield "chat template", _chat_template(finding)
    defaults = finding.forecast.get("sampling_defaults") or {}
    yield "its defaults", ", ".join(f"{name} {value}" for name, value in defaults.items())


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for what in ("input", "output"):
        tensors = config.get(what) or ()
        yield f"{what}s", ", ".join(f"{each['name']} {each['data_type'].removeprefix('TYPE_')}" for each in tensors)
    groups = config.get("instance_group") or ()
    yield "instances", ", ".join(f"{each['count']} {each['kind']}" for each in groups)
    steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
    yield "steps", " → ".join(str(step["model_name"]) for step in steps)


def _path(engine: Mapping[str, Any], num_engines: int) -> str:
    if engine["path"] == "mock":
        return "the mock model (no weights)"
    count = engine["threads"]
    threads = f", {count} thread{'s' if count > 1 else ''}" if count else ""
    text = f"{engine['path']} on {engine['device']}, {engine['quantization'] or engine['dtype']}{threads}"
    if num_engines > 1:
        text = f"{num_engines} engines, each: {text}"
    why = engine["why_not_faster"]
    return f"{text}; no native program: {why}" if why else text


def _weights(engine: Mapping[str, Any]) -> str:
    if not engine["num_parameters"]:
        return ""
    text = f"{_size(engine['weight_bytes'])} for {engine['num_parameters'] / 1e6:,.1f} M parameters"
    embedding = engine["embedding_bytes"]
    return f"{text}, and {_size(embedding)} of embedding, read by row" if embedding else text


def _kv_memory(engine: Mapping[str, Any]) -> str:
    if engine["kv_bytes_per_token"] is None:
        return "known when the weights are loaded" if engine["num_parameters"] else ""
    text = f"{_size(engine['kv_bytes_per_token'])} per token"
    if engine["num_kv_blocks"] is None:
        return f"{text}; how many tokens fit is known when the weights are loaded"
    if engine["state_bytes"]:
        text += f", {_size(engine['state_bytes'])} of recurrent state per request"
    if engine["kv_bytes"]:
        text += f"; {_size(engine['kv_bytes'])} for {engine['kv_bytes'] // engine['kv_bytes_per_token']:,} tokens"
    requests = engine["full_length_requests"]
    return f"{text}: {requests} requests of full length at once, {engine['max_num_seqs']} at most"


def _context(engine: Mapping[str, Any]) -> str:
    whole, held = engine["max_model_len"], engine["max_request_tokens"]
    if held is None or held == whole:
        return f"{whole:,} tokens" if whole else ""
    return f"{held:,} tokens, of the model's {whole:,}: more do not fit the KV memory"


def _free_memory(engine: Mapping[str, Any]) -> str:
    """Pages for keys and values are allocated when first used."""
    if engine["device"] != "cpu" or not engine["weight_bytes"]:
        return ""
    available = memory_bytes()[1]
    weights = engine["weight_bytes"] + engine["embedding_bytes"]
    whole = weights + (engine["kv_bytes"] or 0)
    text = f"{_size(available)} of memory are free"
    if weights > available:
        return f"{text}: less than the weights"
    return f"{text}: less than weights and all KV memory ({_size(whole)})" if whole > available else text


def _chat_template(finding: Finding) -> str:
    template = finding.forecast.get("chat_template", "")
    if not template:
        return "none: no chats" if "tokenizer" in finding.forecast else ""
    tools, reasoning = _parsers(finding)
    return f"{len(template):,} characters; tool calls: {tools or 'none known'}; reasoning: {reasoning or 'none'}"


def _parsers(finding: Finding) -> tuple[str, str]:
    """Formats of tool calls and reasoning: those named in the configuration, else those detected in the template."""
    parameters = finding.config.get("parameters") or {}
    named = [(parameters.get(name) or {}).get("string_value", "") for name in ("tool_call_parser", "reasoning_parser")]
    shown = detect(finding.forecast.get("chat_template", ""))
    return named[0] or shown[0], named[1] or shown[1]


def _size(size_bytes: float) -> str:
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / 1024, unit + 1
    return f"{size_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size_bytes:,.1f} {_UNITS[unit]}"
