"""Which matrices of a checkpoint `quantization: int4` keeps as stored.

Used by the loader.
"""

from __future__ import annotations

import logging
from typing import Any

from safetensors import SafetensorError

from ..config import EngineConfig
from ..cpu.linear import StoredMatrices
from ..errors import CheckpointError
from .checkpoint_files import bad_checkpoint
from .gguf_model import KeptLayers
from .int4_formats import Int4Format, Mxfp4Format, PackedFormat
from .located_files import files_of
from .module_names import module_tensors
from .stored_int4 import StoredInt4
from .stored_mxfp4 import StoredMxfp4

logger = logging.getLogger(__name__)


def kept_matrices(
    config: EngineConfig, hf_config: Any, form: PackedFormat | None, is_gguf: bool
) -> StoredMatrices | None:
    """form: how the checkpoint stores 4-bit weights. None = int4 rounds all weights. Raises ValueError or OSError."""
    if config.quantization is None and config.device == "cpu" and isinstance(form, Int4Format):
        logger.info("weights in 4 bits become plain ones: quantization 'int4' would keep them")
    if config.quantization != "int4" or config.load_format == "dummy":
        return None
    if is_gguf:
        return KeptLayers(files_of(config))
    try:
        tensors = module_tensors(files_of(config), hf_config) if form is not None else {}
        if isinstance(form, Mxfp4Format):
            return StoredMxfp4(tensors)
        if not isinstance(form, Int4Format):
            return None
        return StoredInt4(form, tensors) if form.linears(tensors) else None
    except (CheckpointError, SafetensorError) as error:
        raise bad_checkpoint(config.model, error) from error
