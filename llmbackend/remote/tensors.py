"""Tensors on the wire: small ones inside of a message, large ones as frames behind it, without a copy where possible.

For: the messages of both directions. Does not know: sockets. Invariant: a tensor arrives with the same name, datatype,
shape and elements; what was not decoded by the sender is not decoded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmbackend.core.tensors import RawTensor, Tensor, from_wire, wire_view

from .wire import WireTensor

INLINE_BYTES: Final = 16 << 10
Frame = bytes | memoryview


def packed(tensor: Tensor | RawTensor, frames: list[Frame]) -> WireTensor:
    """`tensor` for a message; its elements are added to `frames` where they are large."""
    is_raw = isinstance(tensor, RawTensor)
    data: Frame = tensor.raw if isinstance(tensor, RawTensor) else wire_view(tensor)
    shape = tuple(map(int, tensor.shape))
    if len(data) <= INLINE_BYTES:
        return WireTensor(tensor.name, tensor.datatype, shape, bytes(data), is_raw=is_raw)
    frames.append(data)
    return WireTensor(tensor.name, tensor.datatype, shape, frame=len(frames) - 1, is_raw=is_raw)


def elements(wire: WireTensor, frames: Sequence[Frame]) -> Frame:
    return frames[wire.frame] if wire.frame >= 0 else wire.data


def unpacked(wire: WireTensor, frames: Sequence[Frame]) -> Tensor | RawTensor:
    """The inverse of `packed`. Takes time in proportion to the number of strings."""
    if wire.is_raw:
        return RawTensor(wire.name, wire.datatype, wire.shape, elements(wire, frames))
    return from_wire(wire.name, wire.datatype, wire.shape, elements(wire, frames))
