"""The roles of a program's operations in the model."""

from __future__ import annotations

import ctypes
from enum import StrEnum
from typing import Final, NamedTuple

from ..kernels.operations import ArrangeOp, ConvOp, GateOp, ScanOp


class Role(StrEnum):
    """The role of an operation in the model, in the order within a layer."""

    EMBEDDING = "embedding"
    NORM = "norm"
    LORA = "adapters"
    QKV = "qkv"
    ROTARY = "rotary, KV write"
    ATTENTION = "attention"
    LATENT = "latents, head by head"
    ATTENTION_OUT = "attention out"
    MIXER = "mixer in"
    ARRANGE = "mixer in, order"
    CONVOLUTION = "convolution"
    RECURRENCE = "recurrence"
    GATE = "gate, norm"
    MIXER_OUT = "mixer out"
    GATE_UP = "gate·up"
    DOWN = "down"
    ROUTE = "router"
    EXPERTS_GATE_UP = "experts, gate·up"
    EXPERTS_DOWN = "experts, down"
    MIX = "experts, sum"
    HEAD = "output head"


ROLE_OF: Final = {ArrangeOp: Role.ARRANGE, ConvOp: Role.CONVOLUTION, ScanOp: Role.RECURRENCE, GateOp: Role.GATE}


class Operation(NamedTuple):
    role: Role
    op: ctypes.Structure
