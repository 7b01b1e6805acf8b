"""Checks each place that a description names, before a kernel sees an address.

For: the cache, which reads descriptions from files. Does not know: what the places hold. Invariant: after
`check_places` each array and matrix lies in its memory, whatever the description says.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..cpu.packed_decoder import ArrayAt, MatrixAt, Memories, PackedDecoder


def check_places(decoder: PackedDecoder, memories: Memories) -> None:
    """Raises ValueError."""
    _check(decoder, memories)


def _check(value: Any, memories: Memories) -> None:
    if isinstance(value, ArrayAt):
        memories.address(value)
    elif isinstance(value, MatrixAt):
        list(memories.matrix_addresses(value))
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _check(getattr(value, name), memories)
    elif isinstance(value, tuple):
        for item in value:
            _check(item, memories)
