"""Fills a model's modules with the tensors of a GGUF file, one at a time.

Used by the loader.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from llmbackend.gguf import stored
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.tensors import GgufTensors

from ..cpu.linear import StoredMatrices
from ..errors import CheckpointError
from ..kernels.library import BLOCKS, load
from ..kernels.operations import Type
from ..kernels.weights import FourBits, StoredBlocks
from .int4_model import fill_plain
from .native_experts import kept_names

logger = logging.getLogger(__name__)


_FOUR_BITS: Final = {"Q4_0": Type.INT4, "Q4_1": Type.INT4_MIN}


class KeptLayers:
    """Linear layers whose weights stay as stored in a GGUF file, by module name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._matrices = stored.FileMatrices(files)

    def type_of(self, layer: str) -> Type | None:
        """None = the layer's weights do not."""
        kind = self._matrices.type_of(f"{layer}.weight")
        return None if kind is None else _FOUR_BITS.get(kind) or Type[kind]

    def order_of(self, layer: str) -> bytes:
        return b""

    def read(self, layer: str) -> FourBits | StoredBlocks:
        kind, name = self.type_of(layer), f"{layer}.weight"
        assert kind is not None, f"{layer} is in no type that is kept"
        if kind in BLOCKS:
            return StoredBlocks(kind, self._matrices.blocks(name))
        return FourBits(*self._matrices.four_bits(name))


def _unpacked(kind: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32] | None:
    native = load() if kind in Type.__members__ and Type[kind] in BLOCKS else None
    return None if native is None else native.unpack_blocks(Type[kind], rows)


def fill_of_gguf(model: Any, files: Sequence[Path], dtype: torch.dtype, kept: StoredMatrices | None) -> None:
    """model: without memory, of the class that the tensors fit. kept: layers whose weights are not read. Raises
    CheckpointError."""
    buffers = [name for name, _ in model.named_buffers()]  # corrections of routers, which other types would round
    try:
        tensors = GgufTensors(files, dtype, _unpacked, buffers)
    except GgufError as error:
        raise CheckpointError(str(error)) from None
    logger.info("weights: %s", tensors.description)
    fill_plain(model, tensors, dtype, frozenset() if kept is None else kept_names(model, kept))
