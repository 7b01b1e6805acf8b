"""How much memory a response takes while it waits to be taken.

For: whatever keeps responses and must bound them (a client's backlog, a step of an ensemble). Does not know: who waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llmbackend.core.tensors import AT_ONCE, Tensor

RESPONSE_BYTES: Final = 512
"""What a response takes in memory beside its tensors' elements (measured: 480 to 700 with one or two tensors)."""


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """About how much memory a response with these tensors holds."""
    size = RESPONSE_BYTES
    for tensor in tensors:
        data = tensor.data
        if tensor.datatype != "BYTES":
            size += data.nbytes
        elif data.size == 1:  # a token's text; this runs once per token
            size += len(data.item())
        else:
            size += sum(sum(map(len, data.flat[start : start + AT_ONCE])) for start in range(0, data.size, AT_ONCE))
    return size
