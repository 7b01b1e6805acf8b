"""What a model that speaks the LLM tensor interface declares, and what can be asked of it.

For: the catalog, which lists such models, and generations, which send them inputs. Does not know: OpenAI's JSON, the
host. Invariant: a model is one only if some prompt that it takes, with the other inputs that this frontend can send,
is all that it requires; only inputs that it declares are sent, each in the rank that it declares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from llmbackend.core.messages import ModelMetadata, TensorMetadata
from llmbackend.core.tensors import Tensor

from .tensors import INPUT_IDS, MESSAGES, OPTION_INPUTS, PROMPT_INPUTS, TEXT_INPUT, TEXT_OUTPUT

_ENDPOINT_INPUTS = (MESSAGES, TEXT_INPUT)
"""Without one of these a model has no endpoint; `input_ids` is another form of a completion's prompt."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """ranks: of each input that this frontend can send, and the model takes, the number of dimensions."""

    ranks: Mapping[str, int]
    fingerprint: str

    @classmethod
    def of(cls, metadata: ModelMetadata) -> LanguageModel | None:
        """None for a model that is no language model, or whose required inputs this frontend does not know."""
        outputs = {tensor.name: tensor.datatype for tensor in metadata.outputs}
        known = {tensor.name: tensor for tensor in metadata.inputs if _is_known(tensor)}
        required = {tensor.name for tensor in metadata.inputs} - metadata.optional_inputs
        prompts = [
            name for name in PROMPT_INPUTS if name in known and required - {name} <= OPTION_INPUTS.keys() & known.keys()
        ]
        if outputs.get(TEXT_OUTPUT) != "BYTES" or not any(name in prompts for name in _ENDPOINT_INPUTS):
            return None
        usable = {name: len(tensor.shape) for name, tensor in known.items() if name in OPTION_INPUTS or name in prompts}
        return cls(usable, f"fp_{metadata.fingerprint}" if metadata.fingerprint else "")

    def takes(self, name: str) -> bool:
        return name in self.ranks

    def fitted(self, tensor: Tensor) -> Tensor:
        """`tensor`, which has one dimension, in the rank that the model declares: batches are of one."""
        shape = (1,) * (self.ranks[tensor.name] - 1) + tensor.shape
        if shape == tensor.shape:
            return tensor
        return dataclasses.replace(tensor, shape=shape, data=tensor.data.reshape(shape))


def _is_known(tensor: TensorMetadata) -> bool:
    """Whether this frontend has such an input, and one value of it has a shape that the model takes."""
    expected = PROMPT_INPUTS.get(tensor.name) or OPTION_INPUTS.get(tensor.name)
    sizes = tensor.shape[:-1] if tensor.name == INPUT_IDS else tensor.shape
    return expected == tensor.datatype and len(tensor.shape) > 0 and all(size in (-1, 1) for size in sizes)
