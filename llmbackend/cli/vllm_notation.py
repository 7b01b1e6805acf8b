"""Rewrites vLLM's command-line notation into the plain one: `--config FILE`, underscores in names, `-tp 2`, `--flag.key
value`, several values after one flag.

Invariants: a command line in plain notation is returned unchanged, but for the flags in _LISTS, which also take the
words after their value (as in vLLM, the model must precede them); flags from a file are placed before those of the
command line, which therefore take precedence.
Source: vLLM's documentation of `vllm serve` and of its FlexibleArgumentParser.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from .command_line import bad_option

_CONFIG: Final = "--config"
_SHORT_NAMES: Final[Mapping[str, str]] = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-O": "--optimization-level",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
_LISTS: Final = frozenset(
    {
        "--allowed-media-domains", "--api-key", "--collect-detailed-traces", "--cpu-offload-params",
        "--cudagraph-capture-sizes", "--device-ids", "--ignore-patterns", "--kv-cache-dtype-skip-layers",
        "--logits-processors", "--lora-modules", "--lora-target-modules", "--numa-bind-cpus", "--numa-bind-nodes",
        "--offload-params", "--served-model-name", "--sleep-preserve-parameter-names",
    }
)  # fmt: skip
"""Flags that take all values up to the next flag."""
_LEVEL: Final = re.compile(r"-O=?(\d)")
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)


def in_plain_notation(args: Sequence[str], parameters: Sequence[Any]) -> list[str]:
    """parameters: those of the command, from typer. Raises BadParameter for an unreadable file or unknown keys."""
    named = {name: each for each in parameters for name in (*each.opts, *each.secondary_opts)}
    words = [_plain_name(word) for word in args]
    words = _with_config_file(words, named)
    return _with_repeated_flags(_with_whole_objects(words), named)


def whole_number(text: str) -> str:
    """vLLM's short forms: 32k is 32000, 32K is 32768. Other texts are returned unchanged."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return text
    power = "kmgt".index(found[2].lower()) + 1
    number = float(found[1]) * (1000**power if found[2].islower() else 1024**power)
    return str(int(number)) if number.is_integer() else text


def _plain_name(word: str) -> str:
    """The flag with dashes in place of underscores, and with the long name in place of a short one."""
    if (level := _LEVEL.fullmatch(word)) is not None:
        return f"--optimization-level={level[1]}"
    if not word.startswith("-"):
        return word
    name, sign, rest = re.fullmatch(r"(-+[^.=]*)([.=]?)(.*)", word, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{_SHORT_NAMES.get(name, name.replace('_', '-') if name.startswith('--') else name)}{sign}{rest}"


def _with_config_file(words: list[str], named: Mapping[str, Any]) -> list[str]:
    """The flags in the file of `--config`, followed by the others."""
    for index, word in enumerate(words):
        name, equals, path = word.partition("=")
        if name == _CONFIG:
            if not equals and index + 1 == len(words):
                raise bad_option(_CONFIG, "--config needs the path of a YAML file")
            file, rest = (path, words[index + 1 :]) if equals else (words[index + 1], words[index + 2 :])
            has_model = any(not each.startswith("-") for each in words[:1]) or any(
                each.partition("=")[0] == "--model" for each in words
            )
            return [*_flags_of_file(Path(file), named, has_model), *words[:index], *rest]
    return words


def _flags_of_file(path: Path, named: Mapping[str, Any], has_model: bool) -> list[str]:
    """has_model: the command line names the model, which takes precedence over the file's."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise bad_option(_CONFIG, f"--config '{path}' cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise bad_option(_CONFIG, f"--config '{path}' has no flags, expected a YAML mapping of flags to values")
    flags: list[str] = []
    for key, value in values.items():
        name = f"--{str(key).replace('_', '-')}"
        if name not in named:
            raise bad_option(_CONFIG, f"--config '{path}' has '{key}', which is not a flag of llmbackend serve")
        if not (name == "--model" and has_model):
            flags += _as_flags(name, value, named)
    return flags


def _as_flags(name: str, value: Any, named: Mapping[str, Any]) -> list[str]:
    if isinstance(value, bool) and named[name].is_flag:
        other = f"--no-{name.removeprefix('--')}"
        return [name] if value else [other] if other in named else []
    if isinstance(value, list) and named[name].multiple:
        return [f"{name}={_text(item)}" for item in value]
    return [] if value is None else [f"{name}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _with_whole_objects(words: Sequence[str]) -> list[str]:
    """`--flag.a.b value` and `--flag.c+ x,y` as `--flag={"a": {"b": value}, "c": ["x", "y"]}`, at the end."""
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        if not name.startswith("--") or "." not in name:
            plain.append(word)
            continue
        if not equals and (text := next(rest, "")) == "":
            raise bad_option(name, f"{name} needs a value")
        flag, *keys = name.removesuffix("+").split(".")
        value = text.split(",") if name.endswith("+") else _value(text)
        _put(objects.setdefault(flag, {}), keys, value)
    return [*plain, *(f"{flag}={json.dumps(value)}" for flag, value in objects.items())]


def _put(target: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise typer.BadParameter(f"'{'.'.join(keys)}' has a value in addition to those of its keys")
    known = target.get(keys[-1])
    target[keys[-1]] = known + value if isinstance(known, list) and isinstance(value, list) else value


def _value(text: str) -> Any:
    """JSON, a number with a unit, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        number = whole_number(text)
        return int(number) if number != text else text


def _with_repeated_flags(words: Sequence[str], named: Mapping[str, Any]) -> list[str]:
    """Repeats a flag for each of its several values, or passes a JSON list if it may be given only once."""
    plain: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word not in _LISTS or word not in named:
            plain.append(word)
            continue
        values = list(itertools.takewhile(lambda each: not each.startswith("-"), words[index:]))
        index += len(values)
        if named[word].multiple or len(values) < 2:
            plain += [f"{word}={value}" for value in values] or [word]
        else:
            plain.append(f"{word}={json.dumps([_value(value) for value in values])}")
    return plain
