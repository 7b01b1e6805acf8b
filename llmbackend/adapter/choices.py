"""Choices of one prompt that are sent together: held back until all have ended, ranked, and sent whole.

For: requests without a stream that ask for `n` or `best_of` choices. Does not know: tokens, engines. Invariant: the
order of choices follows from their cumulative logprobs and indices, never from which one ended first; a choice that
fails makes the request fail, once all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmbackend.core.backend_api import ModelInstance, Request, ResponseFlag, Tensor, TritonError

from .response_sender import Choice, ResponseSender
from .resuming import Known, Piece
from .schemas.schema import PROMPT_OUTPUTS, SEQUENCE_INDEX, TaskTimes


class CollectedChoices(ResponseSender):
    """One response with all choices in each output, or one for each choice; FINAL comes with the last."""

    def __init__(
        self,
        request: Request,
        instance: ModelInstance,
        exec_start_ns: int,
        client_error: Callable[[TritonError], TritonError],
        num_tasks: int,
        *,
        count: int,
        joins: bool,
        of_prompt: frozenset[str],
        known: Known | None = None,
    ) -> None:
        """count: how many of the `num_tasks` choices the client gets
        joins: whether one response has them all
        of_prompt: outputs that are equal for all choices, and are there once in a joined response
        known: as of ResponseSender; the first response's delta holds all choices
        """
        super().__init__(request, instance, exec_start_ns, client_error, num_tasks, known=known, num_choices=count)
        self._count = count
        self._is_ranked = count < num_tasks
        self._joins = joins
        self._of_prompt = of_prompt
        self._ended: list[Choice] = []
        self._error: TritonError | None = None
        self._failed: tuple[Piece, ...] = ()
        """Of the choice that failed first."""

    def end(self, choice: Choice, times: TaskTimes) -> None:
        with self._lock:
            self._ended.append(choice)
            self._send_all_after(self._last_flags(), times)

    def fail(self, error: TritonError, times: TaskTimes, piece: Piece | None = None) -> None:
        with self._lock:
            self._error = self._error or error
            self._failed = self._failed or (() if piece is None else (piece,))
            self._send_all_after(self._last_flags(), times)

    def _send_all_after(self, flags: ResponseFlag, times: TaskTimes) -> None:
        if not flags & ResponseFlag.FINAL:
            return
        if self._error is not None:
            self._send_error(self._error, flags, times, self._failed)
            return
        *others, last = self._responses()
        pieces = tuple(piece for choice in self._ended for piece in choice.pieces)
        for outputs in others:
            self._send(outputs, ResponseFlag.NONE, times, pieces)
            pieces = ()
        self._send(last, flags, times, pieces)

    def _responses(self) -> list[list[Tensor]]:
        choices = sorted(self._ended, key=self._rank)[: self._count]
        numbered = [_numbered(choice.outputs, index) for index, choice in enumerate(choices)]
        # Those of the first choice, which may not be among the best.
        numbered[0] += [tensor for choice in self._ended for tensor in choice.outputs if tensor.name in PROMPT_OUTPUTS]
        return [joined(numbered, self._of_prompt)] if self._joins else numbered

    def _rank(self, choice: Choice) -> tuple[float, int]:
        return -choice.cumulative_logprob if self._is_ranked else 0.0, choice.index


def joined(choices: Sequence[Sequence[Tensor]], of_prompt: frozenset[str]) -> list[Tensor]:
    """Each output of all choices, one behind the other; those `of_prompt` once."""
    names = [tensor.name for tensor in choices[0]]
    by_name = [{tensor.name: tensor for tensor in tensors} for tensors in choices]
    return [
        by_name[0][name] if name in of_prompt else _concatenated([tensors[name] for tensors in by_name])
        for name in names
    ]


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    data = np.concatenate([part.data for part in parts])
    return Tensor(parts[0].name, parts[0].datatype, tuple(data.shape), data)


def _numbered(tensors: Sequence[Tensor], index: int) -> list[Tensor]:
    """The outputs of the choice itself, with another index."""
    return [
        Tensor.of(tensor.name, np.full_like(tensor.data, index)) if tensor.name == SEQUENCE_INDEX else tensor
        for tensor in tensors
        if tensor.name not in PROMPT_OUTPUTS
    ]
