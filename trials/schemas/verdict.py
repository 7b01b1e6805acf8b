"""Compares one schema with its grammar: whatever the grammar generates must be valid, and whatever is invalid must be
impossible.

Used by the neighbouring tests and `make schemas`. Independent of where schemas come from. Invariant: a strict schema is
either refused with a path, or explored, with every wrong verdict reported. Other schemas are judged without the
keywords reported as not enforced.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from jsonschema.protocols import Validator
from referencing.exceptions import Unresolvable

from llmbackend.adapter.structured_outputs.compilation import GrammarCompiler
from llmbackend.core.backend_api import ErrorCode, TritonError
from tests.helpers.byte_grammars import grammar, not_enforced, walk

from .oracle import exact, validator

Instances = Sequence[tuple[Any, bool | None]]


@dataclass
class Tally:
    schemas: int = 0
    refused: int = 0
    """Schemas, each with the path of what is not enforced."""
    reduced: int = 0
    """Schemas of which something is named as not enforced."""
    valid_texts: int = 0
    cut_off: int = 0
    """Walks that were longer than allowed: as an answer that ends by `length`."""
    wrong_texts: int = 0
    """Invalid texts that were tried."""
    not_judged: int = 0
    """Texts of schemas that the oracle cannot read."""
    not_generated: int = 0
    """Valid instances of suites that the grammar does not write, for example because of the order of their names."""
    wrong_verdicts: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"schemas: {self.schemas} ({self.refused} refused with a path, {self.reduced} in part), texts: "
            f"{self.valid_texts} generated and valid, {self.cut_off} cut off, {self.wrong_texts} invalid ones "
            f"impossible, {self.not_generated} valid ones not generated, {self.not_judged} not judged, "
            f"{len(self.wrong_verdicts)} wrong verdicts"
        )


def judge(
    compiler: GrammarCompiler,
    schema: Any,
    rng: random.Random,
    tally: Tally,
    *,
    walks: int,
    instances: Instances = (),
    is_strict: bool = True,
) -> None:
    """Judges one schema; `instances`, with whether they are valid, are tried beside those that it makes itself."""
    tally.schemas += 1
    asked = {"json": schema, "strict": is_strict}
    try:
        text = grammar(compiler, structured_outputs=asked) if schema is not False else ""
    except TritonError as error:
        tally.refused += 1
        if error.code is not ErrorCode.INVALID_ARG or "structured_outputs' at /json" not in error.message:
            tally.wrong_verdicts.append(f"{_short(schema)}: refused without a path: {error.message}")
        return
    if schema is False:
        return
    if left_out := not_enforced(compiler, structured_outputs=asked):
        tally.reduced += 1
        schema = without(schema, left_out)
        instances = [(instance, None) for instance, _ in instances]
    judged = validator(schema)
    for _ in range(walks):
        written = walk(compiler, rng, text)
        if written is None:
            tally.cut_off += 1
            continue
        tally.valid_texts += 1
        is_valid = _is_valid(judged, written)
        tally.not_judged += is_valid is None
        if is_valid is False:
            tally.wrong_verdicts.append(f"{_short(schema)}: writes {written[:200]!r}")
        instances = [*instances, *((item, None) for item in _mutated(json.loads(written), rng))]
    for instance, is_valid in instances:
        _try(compiler, text, schema, judged, instance, is_valid, tally)


def without(schema: Any, left_out: Sequence[str]) -> Any:
    """The schema without what stands at these places."""
    reduced = json.loads(json.dumps(schema))
    for place in left_out:
        *parents, name = [unquote(part).replace("~1", "/").replace("~0", "~") for part in place.split("/")[2:]]
        node = reduced
        for part in parents:
            node = node[int(part) if isinstance(node, list) else part]
        node.pop(name, None)
    return reduced


def _is_valid(judged: Validator, text: str) -> bool | None:
    """None where the validator cannot judge: Python has not all regular expressions of ECMA-262."""
    try:
        return bool(judged.is_valid(exact(text)))
    except (re.error, Unresolvable):
        return None


def _try(
    compiler: GrammarCompiler,
    text: str,
    schema: Any,
    judged: Validator,
    instance: Any,
    is_valid: bool | None,
    tally: Tally,
) -> None:
    spellings = [json.dumps(instance, ensure_ascii=False), json.dumps(instance, separators=(",", ":"))]
    if is_valid is None:
        is_valid = _is_valid(judged, spellings[0])
    taken = [spelling for spelling in spellings if _accepts(compiler, text, spelling)]
    if is_valid is None:
        tally.not_judged += 1
        return
    if is_valid:
        tally.not_generated += not taken
        return
    tally.wrong_texts += 1
    if taken:
        tally.wrong_verdicts.append(f"{_short(schema)}: accepts {taken[0][:200]!r}")


def _accepts(compiler: GrammarCompiler, grammar_text: str, text: str) -> bool:
    matcher = compiler.matcher(grammar_text)
    try:
        tokens = list(text.encode())
    except UnicodeEncodeError:
        return False
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


_OTHERS: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    10**6,
    0.125,
    "",
    "a",
    "zz",
    "\n",
    [],
    [None],
    {},
    {"a": 1},
    {"zz": "zz"},
)


def _mutated(value: Any, rng: random.Random) -> Iterator[Any]:
    """The value with one part replaced, dropped, added or doubled."""
    yield rng.choice(_OTHERS)
    if isinstance(value, dict):
        yield {**value, rng.choice(["a", "b", "zz", "kind"]): rng.choice(_OTHERS)}
        if value:
            name = rng.choice(sorted(value))
            yield {key: item for key, item in value.items() if key != name}
            yield {**value, name: next(iter(_mutated(value[name], rng)))}
            for deeper in _mutated(value[name], rng):
                yield {**value, name: deeper}
    elif isinstance(value, list):
        yield [*value, rng.choice(_OTHERS)]
        yield [*value, *value]
        if value:
            at = rng.randrange(len(value))
            yield value[:at] + value[at + 1 :]
            yield [*value[:at], next(iter(_mutated(value[at], rng))), *value[at + 1 :]]
    elif isinstance(value, str):
        yield from (value + "x", value[:-1], value[::-1], value + "\n", f"{value}{value}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value + 1, value - 1, -value, value * 10, value + 0.5, value / 3)


def _short(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)[:400]
