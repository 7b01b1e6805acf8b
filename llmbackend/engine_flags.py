"""The engine's arguments as flags of `llmbackend serve`, for the one model of `--model`.

For: the command line. Does not know: any argument's meaning: names, types and defaults are those of the table that a
model.json is read with (adapter.engine_args). Invariants: every argument of the table is a flag, by vLLM's name with
dashes; a flag that was not given is not passed on; errors name flags.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from llmbackend.adapter.engine_args import (
    LORA_MODULES,
    OWN_PARAMETERS,
    check_checkpoint,
    read_given_arguments,
    read_own_parameters,
)
from llmbackend.adapter.vllm_engine_args import NO_EFFECT, ONLY_VALUE
from llmbackend.core.errors import TritonError
from llmbackend.engine.config import EngineConfig

from .engine_flag_help import HELP, INERT_PANEL, OTHER_PANEL, QUEUE_PANEL
from .single_model import SingleModel
from .start_failure import advice

_GIVEN_ELSEWHERE = frozenset({"model", "served_model_name"})
_INERT_SWITCHES = re.compile(
    r"(disable|enable|use|engine_use|worker_use|ray_workers_use)_\w+|multi_step_stream_outputs|aggregate_engine_logging|"
    r"calculate_kv_scales|kv_sharing_fast_prefill|fully_sharded_loras|skip_tokenizer_init"
)
"""Which of vLLM's arguments without effect here take no value on its command line."""
_HUMAN_READABLE = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)
_NAMED = re.compile(r"(?:command line: )?(?:engine argument|parameter) '(\w+)'")


class EngineFlags:
    """What was given, by the argument's name; values are text, but for switches."""

    def __init__(self, **flags: Any) -> None:
        self._given = {name: value for name, value in flags.items() if value is not None and value != []}

    @classmethod
    def parameters(cls) -> dict[str, inspect.Parameter]:
        """One for each flag."""
        found = {field.name: _flag(field) for field in msgspec.structs.fields(EngineConfig)}
        found |= {name: _text_flag(name, QUEUE_PANEL, "NUMBER", "") for name in OWN_PARAMETERS}
        found |= {name: _inert_flag(name) for name in (*sorted(NO_EFFECT), *ONLY_VALUE)}
        return {
            name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in found.items()
            if name not in _GIVEN_ELSEWHERE
        }

    def warnings(self) -> tuple[str, ...]:
        """What is said of flags that were given and do nothing here."""
        return tuple(f"{flag_of(name)} has no effect here" for name in self._given if name in NO_EFFECT)

    def model(self, model: str, name: str) -> SingleModel | None:
        """What `--model` and these flags ask for; None without `--model`. Raises BadParameter naming the flag."""
        if not model:
            if self._given:
                message = "is an engine argument of --model; models of a repository have theirs in model.json"
                first = flag_of(next(iter(self._given)))
                raise typer.BadParameter(f"{first} {message}", param_hint=first)
            return None
        given = {name: value for name, value in self._given.items() if name not in NO_EFFECT}
        parameters = {name: given.pop(name) for name in OWN_PARAMETERS if name in given}
        if LORA_MODULES in given:
            given[LORA_MODULES] = _lora_modules(given[LORA_MODULES])
        for readable in _HUMAN_READABLE:
            if readable in given:
                given[readable] = _number(given[readable])
        try:
            arguments = read_given_arguments({"model": model, **given}, Path.cwd())
            read_own_parameters(parameters)
            check_checkpoint(EngineConfig(**arguments))
        except (TritonError, ValueError) as error:
            text = as_flags(str(error))
            flag = next(iter(re.findall(r"--[\w-]+", text)), "--model")
            raise typer.BadParameter(f"{text.rstrip('.')}. {advice(text, 'See --help.')}", param_hint=flag) from None
        return SingleModel(model=model, name=name, arguments=msgspec.to_builtins(arguments), parameters=parameters)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def as_flags(text: str) -> str:
    """An error about engine arguments, naming their flags."""
    return _NAMED.sub(lambda found: flag_of(found[1]), text)


def _flag(field: msgspec.structs.FieldInfo) -> Any:
    name, kinds = field.name, _kinds(field.type)
    panel, help_text = HELP.get(name, (OTHER_PANEL, ""))
    is_hidden = name.startswith("mock_") or name == "fault_directory"
    if bool in kinds:
        flags = f"{flag_of(name)}/--no-{name.replace('_', '-')}"
        shown = help_text if field.default is None else f"{help_text} (default: {'on' if field.default else 'off'})"
        option = typer.Option(flags, help=shown.strip(), rich_help_panel=panel, hidden=is_hidden, show_default=False)
        return Annotated[bool | None, option]
    if name == LORA_MODULES:
        option = typer.Option(flag_of(name), metavar="NAME=PATH", help=help_text, rich_help_panel=panel)
        return Annotated[list[str] | None, option]
    shown = help_text
    if isinstance(field.default, int | float) or (isinstance(field.default, str) and field.default):
        shown += f" (default: {field.default})"
    return _text_flag(name, panel, _metavar(kinds), shown.strip(), hidden=is_hidden)


def _text_flag(name: str, panel: str, metavar: str, help_text: str, hidden: bool = False) -> Any:
    help_text = help_text or HELP.get(name, ("", ""))[1]
    option = typer.Option(flag_of(name), metavar=metavar, help=help_text, rich_help_panel=panel, hidden=hidden)
    return Annotated[str | None, option]


def _inert_flag(name: str) -> Any:
    only = ONLY_VALUE.get(name)
    text = "No effect." if only is None else f"Only {' or '.join(json.dumps(value) for value in only)}."
    if _INERT_SWITCHES.fullmatch(name) or (only and any(isinstance(value, bool) for value in only)):
        flags = f"{flag_of(name)}/--no-{name.replace('_', '-')}"
        option = typer.Option(flags, help=text, rich_help_panel=INERT_PANEL, hidden=True)
        return Annotated[bool | None, option]
    return _text_flag(name, INERT_PANEL, "VALUE", text, hidden=True)


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The types that a value may have, without None."""
    parts = get_args(kind) if get_origin(kind) not in (None, Literal, tuple, dict) else (kind,)
    return tuple(part for part in parts if part is not type(None))


def _metavar(kinds: tuple[Any, ...]) -> str:
    choices = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    if choices:
        return "|".join(choices)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(kinds[0], "JSON")


def _number(text: str) -> str:
    """vLLM's short forms: 32k is 32000, 32K is 32768; others as they are."""
    found = _HUMAN.fullmatch(text)
    if found is None:
        return text
    power = "kmgt".index(found[2].lower()) + 1
    number = float(found[1]) * (1000**power if found[2].islower() else 1024**power)
    return str(int(number)) if number.is_integer() else text


def _lora_modules(items: list[str]) -> Mapping[str, str]:
    """`name=path`, or vLLM's JSON object with `name` and `path`."""
    modules: dict[str, str] = {}
    for item in items:
        name, _, path = item.partition("=")
        if item.lstrip().startswith("{"):
            try:
                value = json.loads(item)
                name, path = value["name"], value["path"]
            except (ValueError, KeyError, TypeError):
                name = path = ""
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            message = f"--lora-modules is '{item}', expected NAME=PATH"
            raise typer.BadParameter(message, param_hint="--lora-modules")
        modules[name] = str(Path(path).expanduser().resolve())
    return modules
