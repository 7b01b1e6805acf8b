"""A program is used only after it gave the probes' logits as the model's own modules gave them.

For: whoever builds a program for an accelerator. Does not know: how either side computes. Invariant: a model whose
description misses something runs as the modules it is, and never as a program that computes something else.
"""

from __future__ import annotations

import torch

from ..compatibility import CheckedModel
from ..decoder_description import UnrecognisedError
from .ops import StepLayout
from .program import GpuProgram

LONGEST_PROBE = 8
"""The tokens and the samples that a program must have room for, to be proved."""


def prove(program: GpuProgram, checked: CheckedModel, block_size: int) -> None:
    """Computes every probe sequence alone, in the KV memory's first blocks. Raises UnrecognisedError."""
    logits = [_logits(program, sequence, block_size) for sequence in checked.sequences]
    if difference := checked.difference(torch.cat(logits)):
        raise UnrecognisedError(f"the program's logits differ from the modules' {difference}")


def _logits(program: GpuProgram, token_ids: torch.Tensor, block_size: int) -> torch.Tensor:
    layout = sequence_layout(token_ids)
    blocks = torch.arange(-(-len(token_ids) // block_size), dtype=torch.int32, device=token_ids.device)
    return program.forward(layout, blocks[None]).clone()


def sequence_layout(token_ids: torch.Tensor) -> StepLayout:
    """One sequence from its start, in blocks 0, 1, 2, …; samples follow each of its tokens."""

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=token_ids.device)

    length = len(token_ids)
    places = torch.arange(length, dtype=torch.int32, device=token_ids.device)
    return StepLayout(
        rows=numbers(0),
        query_start=numbers(0, length),
        seq_lens=numbers(length),
        token_ids=token_ids.to(torch.int32),
        positions=places,
        slots=places,
        sampled_tokens=places,
        sampled_rows=torch.zeros_like(places),
        max_query_len=length,
        max_seq_len=length,
    )
