"""A model's modules are given the tensors of a GGUF file, one after the other.

For: the loader. Does not know: engine arguments, how the file is laid out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.four_bits import FourBitMatrices
from llmbackend.gguf.tensors import GgufTensors

from ..errors import CheckpointError
from ..kernels.library import Type
from ..kernels.weights import FourBits
from .int4_model import fill_plain

logger = logging.getLogger(__name__)


class StoredFourBits:
    """Linear layers whose weights a GGUF file has in 4 bits, by the names of their modules."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._matrices = FourBitMatrices(files)

    def type_of(self, layer: str) -> Type | None:
        """None: its weights are in another type."""
        has_mins = self._matrices.has_mins(f"{layer}.weight")
        return None if has_mins is None else Type.INT4_MIN if has_mins else Type.INT4

    def order_of(self, layer: str) -> bytes:
        return b""

    def read(self, layer: str) -> FourBits:
        return FourBits(*self._matrices.read(f"{layer}.weight"))


def fill_of_gguf(model: Any, files: Sequence[Path], dtype: torch.dtype) -> None:
    """model: without memory, of the class that the tensors fit. Raises CheckpointError."""
    try:
        tensors = GgufTensors(files, dtype)
    except GgufError as error:
        raise CheckpointError(str(error)) from None
    logger.info("weights: %s", tensors.description)
    fill_plain(model, tensors, dtype)
