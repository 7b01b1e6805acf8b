"""Checkpoints whose experts are in mxfp4, as gpt-oss is published.

For: the loader. Does not know: models, devices, how such weights are multiplied by. In place of the weight E [experts,
k, n] of a model (…experts.gate_up_proj, …experts.down_proj) there are E_blocks, uint8 [experts, n, k / 32, 16], two
numbers of e2m1 in each byte, the first one in its lower half, and E_scales, uint8 [experts, n, k / 32] of e8m0. All
other weights are plain. Invariant: what is of another type or shape is refused by the name of its tensor.
Source: the Open Compute Project's microscaling formats (MX) 1.0, and the checkpoints that OpenAI published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..errors import CheckpointError
from ..gpu.expert_weights import Int4Experts
from ..gpu.int4_weights import Int4Weight
from .checkpoint_files import TensorHeader, few

_GROUP: Final = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """As PackedFormat."""

    bytes_per_number: float = 0.5 + 1 / _GROUP

    def plain(self, tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        weights = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
        if missing := [scales for name in weights if (scales := f"{name}{_SCALES}") not in tensors]:
            raise CheckpointError(f"its tensors do not fit its quantization_config: missing: {few(missing)}")
        own = {f"{name}{ending}" for name in weights for ending in (_BLOCKS, _SCALES)}
        plain = {name: TensorHeader("BF16", _shape(tensors, name)) for name in weights}
        return {name: header for name, header in tensors.items() if name not in own} | plain

    def spare(self, tensors: Mapping[str, TensorHeader]) -> frozenset[str]:
        return frozenset()

    def linears(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        return set()

    def has_experts(self, tensors: Mapping[str, torch.Tensor], module: str) -> bool:
        return f"{module}.down_proj{_BLOCKS}" in tensors

    def read_experts(
        self, tensors: Mapping[str, torch.Tensor], module: str, name: str, device: torch.device, exact: bool
    ) -> Int4Experts:
        blocks, scales = (tensors[f"{module}.{name}{ending}"] for ending in (_BLOCKS, _SCALES))
        experts = [
            Int4Weight.of(_numbers(block.to(device)), scale.to(device), None, _GROUP, exact, is_float=True)
            for block, scale in zip(blocks, scales, strict=True)
        ]
        return Int4Experts(Int4Weight.stacked(experts), len(experts))


def _shape(tensors: Mapping[str, TensorHeader], name: str) -> tuple[int, ...]:
    blocks, scales = (tensors[f"{name}{ending}"] for ending in (_BLOCKS, _SCALES))
    if blocks.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
        raise CheckpointError(
            f"its tensor '{name}{_BLOCKS}' is of type {blocks.dtype} and shape {list(blocks.shape)}, expected U8 and "
            f"[experts, outputs, inputs / {_GROUP}, {_GROUP // 2}]"
        )
    num_experts, n, groups, _ = blocks.shape
    if scales.dtype != "U8" or tuple(scales.shape) != (num_experts, n, groups):
        raise CheckpointError(
            f"its tensor '{name}{_SCALES}' is of type {scales.dtype} and shape {list(scales.shape)}, expected U8 and "
            f"{[num_experts, n, groups]}"
        )
    return num_experts, groups * _GROUP, n


def _numbers(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [n, k] of [n, k / 32, 16]"""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
