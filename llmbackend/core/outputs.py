"""Response outputs as plain Python values, converted to tensors on first access.

For backends that send many small responses, and for frontends that write text or JSON and need no arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, overload

import msgspec
import numpy as np

from .tensors import NUMPY_DTYPE, JsonTensor, Tensor

JSON: Final = "JSON"
"""In a layout: the value becomes a BYTES tensor with its JSON text."""
_encode_json = msgspec.json.encode
_LAYOUTS: Final = 1024
_NUMBER_BYTES: Final = 8
_MEMBER_BYTES: Final = 256
"""About the memory of a member of a JSON object, such as the three fields of a logprob."""


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """Names and datatypes (KServe's, or JSON) of a response's outputs. `layout_of` returns the same object for equal
    layouts: the responses of a stream share it, so their common parts are prepared only once.

    is_text: whether each output is one string
    """

    names: tuple[str, ...]
    datatypes: tuple[str, ...]
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_text", all(datatype == "BYTES" for datatype in self.datatypes))


@functools.lru_cache(maxsize=_LAYOUTS)
def layout_of(names: tuple[str, ...], datatypes: tuple[str, ...]) -> OutputLayout:
    return OutputLayout(names, datatypes)


@functools.lru_cache(maxsize=_LAYOUTS)
def _others(layout: OutputLayout, names: frozenset[str]) -> tuple[list[int], OutputLayout]:
    """The indices of the outputs not in `names`, and their layout."""
    kept = [index for index, name in enumerate(layout.names) if name not in names]
    return kept, layout_of(tuple(layout.names[one] for one in kept), tuple(layout.datatypes[one] for one in kept))


class Outputs(Sequence[Tensor]):
    """One value per output of `layout`: `str` or `bytes` for BYTES, a (nested) list of numbers for other datatypes, any
    value that msgspec can encode for JSON. As a sequence, contains the tensors, created once."""

    __slots__ = ("_tensors", "layout", "values")

    def __init__(self, layout: OutputLayout, values: tuple[Any, ...]) -> None:
        self.layout = layout
        self.values = values
        self._tensors: tuple[Tensor, ...] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        if self._tensors is None:
            layout = self.layout
            self._tensors = tuple(map(_tensor, layout.names, layout.datatypes, self.values))
        return self._tensors

    def named(self) -> dict[str, Any]:
        return dict(zip(self.layout.names, self.values, strict=True))

    def without(self, names: frozenset[str]) -> Outputs:
        kept, layout = _others(self.layout, names)
        return Outputs(layout, tuple([self.values[index] for index in kept]))

    def num_bytes(self) -> int:
        """Approximate memory of the values."""
        if self.layout.is_text:  # a token's text; this runs once per token
            return sum(map(len, self.values))
        return sum(map(_num_bytes, self.values))

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self.tensors[index]

    def __reduce__(self) -> tuple[Any, ...]:
        layout = self.layout
        return _restored, (layout.names, layout.datatypes, self.values)


def _restored(names: tuple[str, ...], datatypes: tuple[str, ...], values: tuple[Any, ...]) -> Outputs:
    return Outputs(layout_of(names, datatypes), values)


def _tensor(name: str, datatype: str, value: Any) -> Tensor:
    if datatype == "BYTES":
        return Tensor.text(name, value)
    if datatype == JSON:
        return JsonTensor.of_value(name, value, _encode_json(value))
    data = np.array(value, dtype=NUMPY_DTYPE[datatype])
    return Tensor(name, datatype, tuple(data.shape), data)


def _num_bytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return _MEMBER_BYTES * len(value)
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    return _NUMBER_BYTES
