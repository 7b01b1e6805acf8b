"""Hypothesis strategies for almost valid input: valid examples with an unusual part.

Used by every target. Independent of what reads the input. Invariant: a strategy draws all its randomness from
hypothesis, so that a failure shrinks and replays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

_DEPTHS = (99, 260, 1010)
"""Around the limits: ours (100), those of orjson's output (254) and input (1024), and of Python's recursion (1000)."""
_DEEP = {
    f"<{depth} {kind}>": opening * depth + b"0" + closing * depth
    for depth in _DEPTHS
    for kind, opening, closing in (("lists", b"[", b"]"), ("objects", b'{"a":', b"}"))
}
"""Words that `as_json` replaces: Python's JSON writer does not go that deep."""
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


_huge, _floats, _strings = st.sampled_from(_HUGE), st.sampled_from(_FLOATS), st.sampled_from(_STRINGS)
_deep = st.sampled_from(sorted(_DEEP))
strange_scalars = st.one_of(
    _huge, _floats, _strings, st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)
)
strange_values = st.one_of(
    _huge,
    _floats,
    _strings,
    _deep,
    _deep,  # twice as often: most places refuse what is deep by its type
    st.recursive(
        strange_scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=8,
    ),
)
Path = tuple[Any, ...]
"""Keys and indices from a JSON value's root to a place in it."""


@st.composite
def json_like(draw: st.DrawFn, examples: Sequence[Any]) -> Any:
    """One of `examples` in which up to three places, each as likely as any other, hold something else, are gone or are
    doubled."""
    value = json.loads(json.dumps(draw(st.sampled_from(examples))))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, 0]))):
        value = _changed(draw, value, draw(st.sampled_from(_places(value))))
    return value


def _places(value: Any, path: Path = ()) -> list[Path]:
    if isinstance(value, dict):
        children = list(value.items())
    else:
        children = list(enumerate(value)) if isinstance(value, list) and len(value) < 10 else []
    found = [path]
    if len(path) < 10:  # a value nested deeper was put there by a change before
        for key, item in children:
            found += _places(item, (*path, key))
    return found


def _changed(draw: st.DrawFn, value: Any, path: Path) -> Any:
    """`value` with the place at `path` changed."""
    if not path:
        return _instead_of(draw, value)
    key, rest = path[0], path[1:]
    copy = value.copy()
    if rest or draw(st.integers(0, 5)) > 0:
        copy[key] = _changed(draw, value[key], rest)
    else:
        del copy[key]
    return copy


def _instead_of(draw: st.DrawFn, value: Any) -> Any:
    more = draw(st.integers(0, 3)) == 0
    if more and isinstance(value, dict):
        return value | {draw(_strings | st.text(max_size=6)): draw(strange_values)}
    if more and isinstance(value, list) and 0 < len(value) < 100:
        return value * draw(st.sampled_from([0, 2, 70, 2000]))
    return draw(strange_values)


def as_json(value: Any) -> bytes:
    """JSON with everything that Python's writer lets through: NaN, Infinity, lone surrogates as escapes."""
    text = json.dumps(value).encode()
    if b'"<' in text:
        for word, deep in _DEEP.items():
            text = text.replace(json.dumps(word).encode(), deep)
    return text


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
