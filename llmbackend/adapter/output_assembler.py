"""From an engine's tokens to what a client sees: text, ids, log probabilities and finish reason, cut at the same place.

For: one request's outputs, stream or not. Does not know: Triton, other requests. Invariant: text, ids and logprobs of
all chunks put together are the same however the engine's steps were cut and however often chunks were taken.
Where a stop string ends a request, the tokens up to and including the one that completed it are kept, the text is cut
(as vLLM does). A stop sequence of token ids ends it in the same way, and cuts nothing. An end-of-sequence or stop token
is kept as a token and adds no text, unless include_stop_str_in_output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmbackend.engine.infer_request import FinishReason, StepOutput, TokenLogprobs

from .detokenizer import Detokenizer
from .sampling import GenerationParams
from .stop_sequences import StopSequences
from .stop_strings import StopStrings


@dataclass(slots=True)
class Chunk:
    """What came since the last chunk was taken. finish_reason and ends_with_stop_token (the last token is the one that
    ended the generation: an end-of-sequence or stop token) are set in the last one only."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    ends_with_stop_token: bool = False


class OutputAssembler:
    """Owner: its InferTask; only the loop thread of the request's LlmManager calls it."""

    def __init__(self, params: GenerationParams, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._stop = StopStrings(params.stop, params.include_stop_str_in_output)
        self._sequences = StopSequences(params.stop_sequences)
        self._min_tokens = params.sampling.min_tokens if params.stop else 0
        self._show_stop_token = params.include_stop_str_in_output
        self._chunk = Chunk()
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None

    @property
    def has_text(self) -> bool:
        """Is there text to show in the chunk under construction?"""
        return bool(self._chunk.text)

    def push(self, output: StepOutput) -> tuple[int, ...]:
        """Takes one step's output in; returns the tokens that belong to the request.

        Sets `finish_reason`, to "stop" also when a stop string or sequence ended the request before the engine did.
        """
        ids = output.token_ids
        for index, token_id in enumerate(ids):
            is_stop_token = output.stop_token_id is not None and index == len(ids) - 1
            if not is_stop_token or self._show_stop_token:
                self._show(self._detokenizer.push(token_id), self.num_tokens + index + 1)
            if self._stop.matched is not None or self._sequences.push(token_id):
                self._flush(self.num_tokens + index + 1)
                return self._keep(output, ids[: index + 1], "stop")
        if output.finish_reason is not None:
            self._flush(self.num_tokens + len(ids))
        reason: FinishReason | None = "stop" if self._stop.matched is not None else output.finish_reason
        self._chunk.ends_with_stop_token = reason is not None and output.stop_token_id is not None
        return self._keep(output, ids, reason)

    def take(self) -> Chunk:
        """The chunk under construction; a new one begins."""
        chunk, self._chunk = self._chunk, Chunk()
        return chunk

    def _show(self, text: str, num_tokens: int) -> None:
        """Stop strings do not count in the text of the first min_tokens tokens."""
        if text:
            self._append(self._stop.push(text) if num_tokens > self._min_tokens else text)

    def _flush(self, num_tokens: int) -> None:
        """The generation ends: what was held back is shown, unless a stop string has cut it off."""
        if self._stop.matched is None:
            self._show(self._detokenizer.flush(), num_tokens)
            self._append(self._stop.flush())

    def _append(self, text: str) -> None:
        if text:
            self._chunk.text.append(text)

    def _keep(self, output: StepOutput, ids: tuple[int, ...], reason: FinishReason | None) -> tuple[int, ...]:
        self._chunk.token_ids.extend(ids)
        if output.logprobs:
            logprobs = output.logprobs[: len(ids)]
            self._chunk.logprobs.extend(logprobs)
            self.cumulative_logprob += sum(entry.logprob for entry in logprobs)
        self.num_tokens += len(ids)
        self.finish_reason = self._chunk.finish_reason = reason
        return ids
