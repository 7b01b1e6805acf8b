"""Requests that continue an interrupted one: after the tokens in `prior_output_ids`, or after the deltas of earlier
responses (then on any host).

Used by request conversion, tasks and response senders. Independent of tensors, engines, and of who stores tokens and
deltas. Invariants: a generation's responses follow from its request, its seed and its engines' outputs; deltas contain
the seeds and outputs, so that the same responses can be recreated. Tokens that the interrupted generation cannot have
sent are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy.typing as npt

from llmbackend.core.backend_api import ErrorCode, Resume, TritonError, invalid_argument
from llmbackend.engine.messages import OutputEnd, StepOutput, stop_token_ids

from ..schemas.sampling import GenerationParams
from ..text.output_assembler import OutputAssembler

INPUT: Final = "prior_output_ids"


def prior_output(
    ids: npt.NDArray[Any], params: GenerationParams, *, is_seeded: bool, vocab_size: int, eos_token_ids: Collection[int]
) -> StepOutput:
    """The tokens `ids` as an engine's output, with the finish reason if they ended the generation.

    is_seeded: whether the request specifies its seed, without which the same tokens cannot be drawn again
    Raises TritonError INVALID_ARG naming the input.
    """
    sampling = params.sampling
    _check_reproducible(params, is_seeded)
    if ids.size > sampling.max_tokens:
        raise _output_refused(f"has {ids.size} tokens, expected at most {sampling.max_tokens}, those of max_tokens")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise _output_refused(f"holds {wrong[0]}, expected token ids from 0 to {vocab_size - 1}")
    token_ids = tuple(ids.tolist())
    end = OutputEnd(stop_token_ids(sampling, eos_token_ids), sampling.min_tokens, sampling.max_tokens)
    _check_nothing_behind_end(token_ids, end)
    reason = end.finish_reason(token_ids[-1], len(token_ids))
    return StepOutput("", token_ids, reason, token_ids[-1] if reason == "stop" else None)


def replay(prior: StepOutput, assembler: OutputAssembler) -> None:
    """Brings a new assembler into its state after the tokens, without their text. Raises TritonError INVALID_ARG for
    tokens after the end."""
    assembler.replay(prior)
    if assembler.num_tokens < len(prior.token_ids):
        raise _behind_end(assembler.num_tokens, "complete a stop string")


def _check_reproducible(params: GenerationParams, is_seeded: bool) -> None:
    if params.best_of > 1:
        raise _output_refused(
            f"holds the tokens of one choice, so 'n' and 'best_of' must be 1, got {params.n} and {params.best_of}"
        )
    if params.sampling.temperature > 0 and not is_seeded:
        raise invalid_argument(
            f"sampling parameter 'seed' is missing: give the seed with which the tokens of '{INPUT}' were drawn, or "
            f"temperature 0 (it is {params.sampling.temperature})",
            param="seed",
        )


def _check_nothing_behind_end(token_ids: tuple[int, ...], end: OutputEnd) -> None:
    if end.stop_token_ids.isdisjoint(token_ids):
        return
    for index, token_id in enumerate(token_ids[:-1]):
        if end.finish_reason(token_id, index + 1) == "stop":
            raise _behind_end(index + 1, f"end with the stop token {token_id}")


def _behind_end(num_tokens: int, why: str) -> TritonError:
    return _output_refused(f"continues after the end of its generation: the first {num_tokens} tokens {why}")


def _output_refused(text: str) -> TritonError:
    return invalid_argument(f"input '{INPUT}' {text}", param=INPUT)


class ResumeError(msgspec.Struct, frozen=True, array_like=True):
    """The error with which a generation ended."""

    code: ErrorCode
    message: str
    param: str | None

    @staticmethod
    def of(error: TritonError) -> ResumeError:
        return ResumeError(error.code, error.message, error.param)

    def error(self) -> TritonError:
        return TritonError(self.message, self.code, self.param)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One generation's part of a response.

    index    of the generation in its request
    outputs  of engines, since its last response
    error    in place of outputs, if the generation has failed
    """

    index: int
    outputs: tuple[StepOutput, ...] = ()
    error: ResumeError | None = None


class _Delta(msgspec.Struct, frozen=True, array_like=True):
    """What one response was made from.

    pieces  none if an earlier response contains them
    seeds   in a request's first delta: one for each prompt
    """

    pieces: tuple[Piece, ...] = ()
    seeds: tuple[int, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Delta).decode


class PieceRecord:
    """Collects a generation's outputs since its last response. Owner: its InferTask."""

    __slots__ = ("_index", "_outputs", "add")

    def __init__(self, index: int) -> None:
        """index: the generation's index in its request"""
        self._index = index
        self._outputs: list[StepOutput] = []
        self.add = self._outputs.append

    def take(self) -> Piece:
        piece = Piece(self._index, tuple(self._outputs))
        self._outputs.clear()
        return piece

    def failed(self, error: TritonError) -> Piece:
        return Piece(self._index, error=ResumeError.of(error))


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The state of a resumable request.

    seeds        as in _Delta; () = not drawn yet
    pieces       of its responses so far, in order
    num_to_skip  responses that are recreated but not sent, because their receiver has them
    """

    seeds: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    num_to_skip: int = 0

    @staticmethod
    def of(resume: Resume | None) -> ResumeState | None:
        """None if the request is not resumable. Raises TritonError INVALID_ARG for malformed deltas."""
        if resume is None:
            return None
        deltas = [_read(number, delta) for number, delta in enumerate(resume.deltas)]
        return ResumeState(
            deltas[0].seeds if deltas else (),
            tuple(piece for delta in deltas for piece in delta.pieces),
            0 if resume.replays else len(deltas),
        )

    def seeds_of(self, count: int) -> tuple[int | None, ...]:
        """The `count` seeds of the request; None if not drawn yet. Raises TritonError INVALID_ARG for deltas of
        another request."""
        if self.seeds and len(self.seeds) != count:
            raise _refused(f"they belong to a request with {len(self.seeds)} seeds, this one has {count}")
        return self.seeds or (None,) * count

    def check(self, num_generations: int, vocab_size: int) -> None:
        """Raises TritonError INVALID_ARG for deltas of another request."""
        for piece in self.pieces:
            if not 0 <= piece.index < num_generations:
                raise _refused(f"they name generation {piece.index}, the request has {num_generations}")
            if wrong := [one for one in _token_ids(piece) if not 0 <= one < vocab_size]:
                raise _refused(f"they hold token {wrong[0]}, expected token ids from 0 to {vocab_size - 1}")


class DeltaWriter:
    """Creates the deltas of one request. Owner: its ResponseSender, under whose lock it is called."""

    __slots__ = ("_num_to_skip", "_seeds")

    def __init__(self, seeds: Sequence[int], num_to_skip: int) -> None:
        self._seeds = tuple(seeds)
        self._num_to_skip = num_to_skip

    def skips(self) -> bool:
        """Whether the receiver already has the next response. To be called once per response."""
        if not self._num_to_skip:
            return False
        self._num_to_skip -= 1
        self._seeds = ()
        return True

    def delta(self, pieces: tuple[Piece, ...]) -> bytes:
        if not self._seeds:
            return _encode(_Delta(pieces))
        seeds, self._seeds = self._seeds, ()
        return _encode(_Delta(pieces, seeds))


def _read(number: int, delta: bytes) -> _Delta:
    try:
        return _decode(delta)
    except msgspec.MsgspecError as error:
        raise _refused(f"delta {number} cannot be read: {error}") from None


def _token_ids(piece: Piece) -> Iterator[int]:
    for output in piece.outputs:
        yield from output.token_ids


def _refused(text: str) -> TritonError:
    return invalid_argument(f"the request cannot continue after the deltas of its responses: {text}")
