"""The tensors that one request of an ensemble has produced so far and that somebody still has to take.

For: EnsembleRun, whose lock guards it. Does not know: models, threads. Invariants: values that come from the same
responses belong together, whatever came first; a value is dropped with its last use; nothing is kept that nobody reads.
Source: TensorData in Triton's ensemble_scheduler.cc, which numbers the values of a tensor as they arrive, so that
branches of unequal speed behind a decoupled step get mixed up there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llmbackend.core.backend_api import ParameterValue, RequestFlag
from llmbackend.core.errors import invalid_argument
from llmbackend.core.tensors import Tensor

Origin = tuple[int, ...]
"""Which response of each decoupled step a value comes from, the first step first. () = the request itself. The order of
origins is that in which their responses would come if every step took no time."""
SequenceTag = tuple[int | str, RequestFlag]
"""Correlation id and flags, which travel with the tensors that a step wrote."""


@dataclass(slots=True)
class Value:
    """`tensor` None: an optional input that was not given, or an output that the model left out. `batch_size` is that
    of the request that wrote it, 0 = not batched; `sequence` None: from the client."""

    tensor: Tensor | None
    batch_size: int
    sequence: SequenceTag | None
    uses_left: int


class EnsembleValues:
    def __init__(self, uses: Mapping[str, int]) -> None:
        self._uses = uses
        self._values: dict[tuple[str, Origin], Value] = {}

    def add(
        self, name: str, origin: Origin, tensor: Tensor | None, batch_size: int, sequence: SequenceTag | None
    ) -> None:
        uses = self._uses.get(name, 0)
        if uses:
            self._values[name, origin] = Value(tensor, batch_size, sequence, uses)

    def have(self, names: Iterable[str], origin: Origin) -> bool:
        return all((name, origin) in self._values for name in names)

    def take(self, names: Iterable[str], origin: Origin) -> dict[str, Value]:
        """The values of that origin, each used once more."""
        taken = {name: self._values[name, origin] for name in names}
        for name, value in taken.items():
            value.uses_left -= 1
            if not value.uses_left:
                del self._values[name, origin]
        return taken


def sequence_of(parameters: Mapping[str, ParameterValue], sent: SequenceTag) -> SequenceTag:
    """The sequence that a response names in its parameters, or else the one that its request was sent with. Raises
    TritonError INVALID_ARG for a parameter of a wrong type."""
    names = ("sequence_id", "sequence_start", "sequence_end")
    given = {name: parameters[name] for name in names if name in parameters}
    if not given:
        return sent
    correlation_id = given.pop("sequence_id", sent[0])
    if isinstance(correlation_id, bool) or not isinstance(correlation_id, (int, str)):
        raise invalid_argument(
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        )
    flags = RequestFlag(0)
    for name, flag in (("sequence_start", RequestFlag.SEQUENCE_START), ("sequence_end", RequestFlag.SEQUENCE_END)):
        value = given.get(name, False)
        if not isinstance(value, bool):
            raise invalid_argument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
        flags |= flag if value else RequestFlag(0)
    return correlation_id, flags
