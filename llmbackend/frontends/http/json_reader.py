"""Reads JSON with Triton's strictness and error messages.

Independent of tensors and HTTP. Invariants: a value has exactly the required JSON type (true is not 1, 1.0 is not 1);
no input makes a parser recurse deeper than MAX_DEPTH. orjson parses; what it rejects is parsed again by RapidJSON,
Triton's parser, which accepts NaN and Infinity and reports the error text and byte offset for everything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final

import numpy as np
import orjson
import rapidjson

from llmbackend.core.errors import TritonError, internal, invalid_argument
from llmbackend.core.json_text import count_outside_strings

MAX_DEPTH: Final = 100
_SCAN_BLOCK: Final = 1 << 20

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A JSON string; also matches an unterminated one, so that the scan of hostile bodies stays linear."""
_NOT_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")
_RAPIDJSON_ERROR: Final = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)


def parse(body: bytes) -> Any:
    """Raises TritonError INVALID_ARG for nesting beyond MAX_DEPTH, INTERNAL with RapidJSON's reason for invalid
    JSON."""
    check_depth(body)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return _parse_as_rapidjson(body)


def check_depth(body: bytes) -> None:
    """Raises TritonError INVALID_ARG for brackets nested deeper than MAX_DEPTH."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NOT_BRACKETS), dtype=np.uint8)
    depth = 0
    for start in range(0, brackets.size, _SCAN_BLOCK):  # in blocks: a hostile body may consist of brackets only
        block = brackets[start : start + _SCAN_BLOCK]
        opens = (block == ord("[")) | (block == ord("{"))
        depths = depth + np.cumsum(opens * np.int8(2) - np.int8(1), dtype=np.int64)
        if int(depths.max()) > MAX_DEPTH:
            raise invalid_argument(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
        depth = int(depths[-1])


def check_objects(body: bytes, most: int) -> None:
    """Raises TritonError INVALID_ARG for more than `most` objects and lists, each as slow to parse as 100
    characters."""
    if body.count(b"[") + body.count(b"{") <= most:  # an upper bound: includes those inside strings
        return
    num_objects = count_outside_strings(body, b"{[")
    if num_objects > most:
        raise invalid_argument(f"the request body has {num_objects} JSON objects and lists, expected at most {most}")


def _parse_as_rapidjson(body: bytes) -> Any:
    try:
        return rapidjson.loads(body.partition(b"\0")[0])  # RapidJSON ends the text at a NUL
    except UnicodeDecodeError as error:
        raise _parse_error("Invalid encoding in string.", error.start) from None
    except rapidjson.JSONDecodeError as error:
        match = _RAPIDJSON_ERROR.match(str(error))
        if match is None:
            raise _parse_error(str(error), 0) from None
        raise _parse_error(match[2], int(match[1])) from None
    except ValueError:  # an integer with too many digits for Python; no offset is known
        raise _parse_error("Number too big to be stored in double.", 0) from None


def _parse_error(reason: str, offset: int) -> TritonError:
    return internal(f"failed to parse the request JSON buffer: {reason} at {offset}")


def repeated_keys(body: bytes) -> list[str]:
    """Keys that occur twice in one object of the valid JSON text; parsers silently keep the last value."""
    repeated: dict[str, None] = {}

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated[key] = None
            seen.add(key)

    json.loads(body.partition(b"\0")[0], object_pairs_hook=look, parse_int=str)  # int() refuses very long numbers
    return list(repeated)


def dump(value: Any, *, sort_keys: bool = False, has_nan_or_inf: bool = False) -> bytes:
    """Compact JSON. has_nan_or_inf: NaN and infinities are written as such; otherwise they become null"""
    if has_nan_or_inf:
        text: str = rapidjson.dumps(value, ensure_ascii=False, sort_keys=sort_keys)
        return text.encode()
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)


def member(value: Any, key: str) -> Any:
    """Raises TritonError INTERNAL unless `value` is an object with `key`."""
    if not isinstance(value, dict) or key not in value:
        raise internal(f"attempt to access non-existing object member '{key}'")
    return value[key]


def string_member(value: Any, key: str) -> str:
    """Raises TritonError INTERNAL "Unable to parse '<key>': …" unless `value` is an object with a string `key`."""
    found = value.get(key) if type(value) is dict else None
    if type(found) is str:
        return found
    with parsing(key):
        return as_string(member(value, key))


def array_member(value: Any, key: str) -> list[Any]:
    """Like `string_member`, for an array."""
    found = value.get(key) if type(value) is dict else None
    if type(found) is list:
        return found
    with parsing(key):
        return as_array(member(value, key))


def as_string(value: Any) -> str:
    """Raises TritonError INTERNAL for any other JSON type, like the functions below."""
    if isinstance(value, str):
        return value
    raise internal("attempt to access JSON non-string as string")


def as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise internal("attempt to access JSON non-boolean as boolean")


def as_unsigned(value: Any) -> int:
    if type(value) is int and 0 <= value < 1 << 64:
        return value
    raise internal("attempt to access JSON non-unsigned-integer as unsigned-integer")


def as_array(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    raise internal("attempt to access JSON non-array as array")


def as_object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise internal("attempt to access JSON non-object as object")


@cache  # its arguments are constants
def parsing(field: str, action: str = "parse") -> AbstractContextManager[None]:
    """Prefixes a TritonError raised inside with "Unable to parse '<field>': ": `with parsing("shape"):`."""
    return _Prefixing(f"Unable to {action} '{field}': ")


class _Prefixing(AbstractContextManager[None]):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TritonError):
            raise TritonError(self._prefix + error.message, error.code) from None
