"""What was found out about a model, for people and as JSON.

For: the command. Does not know: how it was found out. Invariant: nothing is shown that the finding does not hold, but
for this machine's free memory and the formats of tool calls and reasoning, which the server's own frontend finds in the
chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from llmbackend.frontends.generation.parsers import detect

from ...server.start_failure import failure_summary
from ..terminal_text import harmless, harmless_line
from .dry_load import Finding

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def as_object(finding: Finding, reasons: Mapping[str, str]) -> dict[str, Any]:
    """For one line of JSON."""
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


def print_finding(finding: Finding, reasons: Mapping[str, str]) -> None:
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
    yield "context", f"{engine['max_model_len']:,} tokens" if engine["max_model_len"] else ""
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
    tokens = engine["kv_bytes"] // engine["kv_bytes_per_token"]
    return (
        f"{text}; {_size(engine['kv_bytes'])} for {tokens:,} tokens: {engine['full_length_requests']} requests of full "
        f"length at once, {engine['max_num_seqs']} at most"
    )


def _free_memory(engine: Mapping[str, Any]) -> str:
    """Pages of keys and values are taken when they are used."""
    available = available_bytes()
    if engine["device"] != "cpu" or not available or not engine["weight_bytes"]:
        return ""
    weights = engine["weight_bytes"] + engine["embedding_bytes"]
    whole = weights + (engine["kv_bytes"] or 0)
    text = f"{_size(available)} of memory are free"
    if weights > available:
        return f"{text}: less than the weights"
    return f"{text}: less than weights and all KV memory ({_size(whole)})" if whole > available else text


def available_bytes() -> int:
    """Memory that this machine could give to new processes; 0 = unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def _chat_template(finding: Finding) -> str:
    template = finding.forecast.get("chat_template", "")
    if not template:
        return "none: no chats" if "tokenizer" in finding.forecast else ""
    tools, reasoning = _parsers(finding)
    return f"{len(template):,} characters; tool calls: {tools or 'none known'}; reasoning: {reasoning or 'none'}"


def _parsers(finding: Finding) -> tuple[str, str]:
    """Formats of tool calls and of reasoning: named in the configuration, else shown by the template."""
    parameters = finding.config.get("parameters") or {}
    named = [(parameters.get(name) or {}).get("string_value", "") for name in ("tool_call_parser", "reasoning_parser")]
    shown = detect(finding.forecast.get("chat_template", ""))
    return named[0] or shown[0], named[1] or shown[1]


def _size(size_bytes: float) -> str:
    unit = 0
    while size_bytes >= 1024 and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / 1024, unit + 1
    return f"{size_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size_bytes:,.1f} {_UNITS[unit]}"
