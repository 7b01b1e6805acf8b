"""The tensors of a 4-bit checkpoint, by the names of the model's modules.

Used by the loader. transformers has its own renaming while it reads unquantised weights; the part that concerns only
names is applied here. Single experts are named M.experts.N.gate_proj, up_proj and down_proj; programs that write
Mixtral and similar families use these names too, or w1, w3 and w2 as in the family's own checkpoints.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..gpu.weights.stored import mapped_tensors

T = TypeVar("T")

_PARTS: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NUMBERED: Final = {part: name for name, part in _PARTS.items()}
_OF_EXPERT: Final = re.compile(rf"(?<=\.experts\.)(\d+)\.({'|'.join((*_PARTS, *_NUMBERED))})(?=\.)")


def module_tensors(files: Iterable[Path], model: Any) -> dict[str, torch.Tensor]:
    """Views of the mapped files. model: all of it, with or without memory. Raises SafetensorError or OSError."""
    tensors = mapped_tensors(files)
    return {_with_parts(new, _PARTS): tensors[name] for name, new in _renamed(tensors, model).items()}


def own_names(tensors: Mapping[str, T], model: Any) -> dict[str, T]:
    """With single experts named as in the family's own checkpoints, for every program that writes them."""
    patterns = [pattern for each in get_model_conversion_mapping(model) for pattern in each.source_patterns]
    parts = _NUMBERED if any(".experts.*.w1." in pattern for pattern in patterns) else {}
    return {_with_parts(name, parts): tensor for name, tensor in tensors.items()}


def reported_names(names: Iterable[str], model: Any) -> frozenset[str]:
    """The names under which transformers reports them if the model lacks them."""
    return frozenset(_renamed(own_names(dict.fromkeys(names), model), model).values())


def _renamed(names: Iterable[str], model: Any) -> dict[str, str]:
    """The names that transformers gives them while reading, by the original ones."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return {name: functools.reduce(lambda new, each: each.rename_source_key(new)[0], renamings, name) for name in names}


def _with_parts(name: str, parts: Mapping[str, str]) -> str:
    return _OF_EXPERT.sub(lambda match: f"{match[1]}.{parts.get(match[2], match[2])}", name)
