"""Logprobs of prompts on the device: the head once more for a few tokens of a step at a time, and what is fetched.

For: the runner, when a step computes prompts whose logprobs are asked for. Does not know: sampling, when its work is
done. Invariants: all that a piece needs of plan and table is read when it is made; every piece has the same number of
rows, padded, so that a token's logprobs do not depend on how many others are computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..messages import TokenLogprobs
from ..sampling.prompt_logprobs import PIECE_TOKENS, prompt_spans
from ..step import BROKEN_LOGITS, Int32Array, RowTable, StepPlan
from .device import Device
from .program import GpuProgram


@dataclass(slots=True, eq=False)
class PromptPiece:
    """Some tokens of a row's prompt.

    token_ids  whose logprobs are asked for
    places     int32 [2, room]: where the tokens before them are in the step's batch, and token_ids; padded
    count      how many of the likeliest tokens are asked for
    fetched    logprobs, ranks, ids and logprobs of the likeliest; from `enqueue` on
    """

    row: int
    token_ids: list[int]
    places: torch.Tensor
    count: int
    fetched: list[torch.Tensor] = field(default_factory=list)

    @torch.inference_mode()
    def enqueue(self, program: GpuProgram, vocab_size: int, device: Device) -> None:
        """Device work, behind the step's forward and before the next one's."""
        behind, token_ids = self.places.to(device.torch_device, non_blocking=True)
        logits = program.logits_behind(behind)[:, :vocab_size].float()
        own = logits.gather(1, token_ids[:, None].long())
        norm = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        ranks = (logits > own).sum(-1) + 1
        parts = [(own.double() - norm)[:, 0], ranks]
        if self.count:
            top, ids = (part[:, : self.count] for part in logits.sort(dim=-1, descending=True, stable=True))
            parts += [ids, top.double() - norm]
        self.fetched = [device.fetch(part) for part in parts]

    def entries(self) -> list[TokenLogprobs]:
        """On the host, once the device has done it."""
        own, ranks, *likeliest = (part[: len(self.token_ids)].tolist() for part in self.fetched)
        ids, top = likeliest or ([[]] * len(own), [[]] * len(own))
        return [
            TokenLogprobs(token_id, own[i], ranks[i], tuple(zip(ids[i], top[i], strict=True)))
            for i, token_id in enumerate(self.token_ids)
        ]


def prompt_pieces(plan: StepPlan, table: RowTable, device: Device, max_samples: int) -> list[PromptPiece]:
    """What the plan's rows need. max_samples: of the program's largest step."""
    pieces: list[PromptPiece] = []
    room = min(PIECE_TOKENS, max_samples)
    for span in prompt_spans(plan, table):
        for first in range(span.first, span.end, room):
            token_ids = table.token_ids[span.row, first : min(first + room, span.end)]
            places = _places(plan, table, span.row, first, token_ids, room)
            tensor = torch.from_numpy(places)
            pinned = tensor.pin_memory() if device.torch_device.type == "cuda" else tensor
            pieces.append(PromptPiece(span.row, token_ids.tolist(), pinned, span.count))
    return pieces


def _places(plan: StepPlan, table: RowTable, row: int, first: int, token_ids: Int32Array, room: int) -> Int32Array:
    index = int(np.flatnonzero(plan.rows == row)[0])
    begin = int(plan.num_scheduled_tokens[:index].sum()) - int(table.num_computed_tokens[row])
    places = np.zeros((2, room), np.int32)
    count = len(token_ids)
    places[0, :count] = begin + np.arange(first - 1, first - 1 + count)
    places[0, count:] = places[0, count - 1]
    places[1, :count] = token_ids
    return places


def entries_of(pieces: Sequence[PromptPiece]) -> tuple[dict[int, list[TokenLogprobs]], dict[int, str]]:
    """By row: its entries, or the error of one whose logits are not finite."""
    found: dict[int, list[TokenLogprobs]] = {}
    for piece in pieces:
        found.setdefault(piece.row, []).extend(piece.entries())
    broken = {row for row, entries in found.items() if not all(np.isfinite(entry.logprob) for entry in entries)}
    return {row: one for row, one in found.items() if row not in broken}, dict.fromkeys(broken, BROKEN_LOGITS)
