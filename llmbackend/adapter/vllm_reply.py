"""vllm_backend's outputs of one generation.

For: VllmSchema. Does not know: requests, responses. Invariant: in a stream every output holds what is new, but
cumulative_logprob, which is so far, and the prompt's counts, which are in every response.
Source: vllm_backend's src/utils/request.py, create_response.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from llmbackend.core.backend_api import Tensor
from llmbackend.engine.infer_request import TokenLogprobs

from .output_assembler import Chunk
from .tensor_schema import Generation, OutputOptions

_encode_json = msgspec.json.encode


class VllmReply:
    def __init__(
        self, options: OutputOptions, *, prompt_text: str, wants_logprobs: bool, token_text: Callable[[int], str]
    ) -> None:
        """prompt_text: what is prepended to the first text, "" for nothing. wants_logprobs: `logprobs` was asked
        for."""
        self._outputs = options.outputs
        self._prompt_text = prompt_text
        self._wants_logprobs = wants_logprobs
        self._token_text = token_text

    def is_due(self, generation: Generation) -> bool:
        """A chunk whose text is still held back waits for it, so that text and tokens of a chunk belong together."""
        return generation.assembler.has_text or "text_output" not in self._outputs

    def tensors(self, chunk: Chunk, generation: Generation) -> list[Tensor]:
        tensors: list[Tensor] = []
        if "text_output" in self._outputs:
            prompt, self._prompt_text = self._prompt_text, ""
            tensors.append(Tensor.text("text_output", prompt + "".join(chunk.text)))
        if len(self._outputs) > len(tensors):
            tensors.extend(self._additional(chunk, generation))
        return tensors

    def _additional(self, chunk: Chunk, generation: Generation) -> list[Tensor]:
        wanted = self._outputs
        tensors: list[Tensor] = []
        if "finish_reason" in wanted:
            tensors.append(Tensor.text("finish_reason", str(chunk.finish_reason)))
        if "cumulative_logprob" in wanted:
            so_far = np.array([generation.assembler.cumulative_logprob], np.float32)
            tensors.append(Tensor.of("cumulative_logprob", so_far))
        if "logprobs" in wanted:
            tensors.append(Tensor.text("logprobs", self._logprobs_json(chunk) if self._wants_logprobs else b"null"))
        if "num_input_tokens" in wanted:
            tensors.append(Tensor.of("num_input_tokens", np.array([generation.num_prompt_tokens], np.uint32)))
        if "num_output_tokens" in wanted:
            tensors.append(Tensor.of("num_output_tokens", np.array([len(chunk.token_ids)], np.uint32)))
        if "num_cached_tokens" in wanted:
            tensors.append(Tensor.of("num_cached_tokens", np.array([generation.num_cached_tokens], np.uint32)))
        if "output_ids" in wanted:
            tensors.append(Tensor.of("output_ids", np.array(chunk.token_ids, np.int32)))
        return tensors

    def _logprobs_json(self, chunk: Chunk) -> bytes:
        return _encode_json([self._position(entry) for entry in chunk.logprobs])

    def _position(self, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
        """The sampled token first, then the most likely ones."""
        position = {str(entry.token_id): self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for index, (token_id, logprob) in enumerate(entry.top):
            position.setdefault(str(token_id), self._logprob(token_id, logprob, index + 1))
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._token_text(token_id)}
