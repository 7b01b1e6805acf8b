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
from llmbackend.gguf.tensors import GgufTensors

from ..errors import CheckpointError
from .int4_model import fill_plain

logger = logging.getLogger(__name__)


def fill_of_gguf(model: Any, files: Sequence[Path], dtype: torch.dtype) -> None:
    """model: without memory, of the class that the tensors fit. Raises CheckpointError."""
    try:
        tensors = GgufTensors(files, dtype)
    except GgufError as error:
        raise CheckpointError(str(error)) from None
    logger.info("weights: %s", tensors.description)
    fill_plain(model, tensors, dtype)
