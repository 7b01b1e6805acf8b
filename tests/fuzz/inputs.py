"""Hypothesis strategies for input that is nearly right: valid examples with something strange in them.

For: every target. Does not know: what reads the input. Invariant: a strategy draws all its randomness from hypothesis,
so that a failure shrinks and replays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

DEPTHS = (90, 99, 101, 200, 260, 900, 1100, 20_000)
"""Around the limits: ours (100), orjson's output (254) and input (1024), Python's recursion limit (1000)."""
_HUGE = (
    0,
    1,
    2,
    99,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    10**30,
    -1,
    -(2**31) - 1,
    -(2**63),
    -(2**64),
)
_FLOATS = (float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, -0.0, 0.5, 1e999)
_STRINGS = (
    "", "\0", "a\0b", "\ud800", "x\udfff", "é名😀", "‮", "../../etc/passwd", "/", ".", "..", "%s%n{0}", "9" * 5000,
    "x" * 300, "x" * 5000, "{", "[" * 2000, "[" * 120_000, '{"a":' * 30_000, "NaN", "1e999", "-1", "true", "null",
    "٣", "²", " 1", "1_0", "\x1b[31m\r\n",
)  # fmt: skip
_WORDS = (
    b"NaN", b"-Infinity", b"1e999", b"-", b"9" * 5000, b"\\ud800", b"\\u0000", b"\0", b"\xff\xfe", b"\xed\xa0\x80",
    b"[" * 101, b"[" * 1500, b'{"a":' * 300, b'"', b"\\", b"//", b"/*", b"#", b"}", b"]", b":", b",", b"<", b">",
    b"\r\n",
)  # fmt: skip


def nested(depth: int, in_objects: bool = False) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value} if in_objects else [value]
    return value


strange_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_HUGE),
    st.sampled_from(_FLOATS),
    st.sampled_from(_STRINGS),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
strange_values = st.one_of(
    strange_scalars,
    st.recursive(
        strange_scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=8,
    ),
    st.builds(nested, st.sampled_from([depth for depth in DEPTHS if depth <= 900]), st.booleans()),
)


@st.composite
def json_like(draw: st.DrawFn, examples: Sequence[Any]) -> Any:
    """One of `examples` in which up to three places hold something else, or are gone, or are doubled."""
    value = json.loads(json.dumps(draw(st.sampled_from(examples))))
    for _ in range(draw(st.integers(0, 3))):
        value = _change(draw, value)
    return value


def _change(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value, key=repr)))
        what = draw(st.sampled_from(["descend", "descend", "delete", "rename", "add"]))
        if what == "descend":
            return value | {key: _change(draw, value[key])}
        rest = {name: item for name, item in value.items() if name != key}
        if what == "delete":
            return rest
        new = draw(st.sampled_from(_STRINGS) | st.text(max_size=6))
        return (rest if what == "rename" else value) | {new: value[key] if what == "rename" else draw(strange_values)}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(value) - 1))
        if draw(st.integers(0, 3)) == 0:
            return value * draw(st.sampled_from([0, 2, 70, 2000]))
        return [*value[:index], _change(draw, value[index]), *value[index + 1 :]]
    return draw(strange_values)


def as_json(value: Any) -> bytes:
    """JSON with everything that Python's writer lets through: NaN, Infinity, lone surrogates as escapes."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 3000


@st.composite
def mutated_bytes(draw: st.DrawFn, examples: Sequence[bytes]) -> bytes:
    """One of `examples` with up to four edits: bytes cut, changed, doubled, or a hostile word put in."""
    data = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 12)))
        piece = draw(st.sampled_from(_WORDS) | st.binary(max_size=6) | st.just(data[at:end] * 2))
        data = data[:at] + piece + data[end:]
    return data


def json_bodies(examples: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Bodies of a JSON endpoint: strange values in valid JSON, or valid examples with broken bytes."""
    return st.one_of(json_like(examples).map(as_json), mutated_bytes([as_json(example) for example in examples]))
