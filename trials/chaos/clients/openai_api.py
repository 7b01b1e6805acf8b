"""Chat and completions with the openai client.

Invariant: see the package. Retries are off, because a stream must survive without them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .http_transport import http_transport, key_header

_OPENAI_FIELDS = frozenset(
    ("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "stop", "logit_bias")
)


class OpenAIClient:
    def __init__(self, address: str, receive_buffer_bytes: int = 0) -> None:
        http = openai.DefaultAsyncHttpxClient(transport=http_transport(httpx2, receive_buffer_bytes))
        self._openai = openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=3600, http_client=http
        )

    async def close(self) -> None:
        await self._openai.close()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        try:
            answer = await self._create(spec)
            if not spec.streams:
                yield _piece(answer, spec)
                return
            try:
                async for chunk in answer:
                    yield _piece(chunk, spec)
            finally:
                await answer.close()
        except openai.APIStatusError as error:
            raise StreamFailed(error.message, str(error.status_code)) from error
        except (openai.OpenAIError, httpx2.HTTPError) as error:
            code = "connection" if isinstance(error, openai.APIConnectionError | httpx2.HTTPError) else ""
            raise StreamFailed(f"{type(error).__name__}: {error} ({error.__cause__!r})", code) from error

    async def _create(self, spec: StreamSpec) -> Any:
        fields = {name: value for name, value in spec.sampling.items() if name in _OPENAI_FIELDS}
        fields["extra_body"] = {name: value for name, value in spec.sampling.items() if name not in _OPENAI_FIELDS}
        fields["extra_headers"] = key_header(spec)
        if spec.streams:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if spec.protocol == "chat":
            if spec.logprobs is not None:
                fields |= {"logprobs": True, "top_logprobs": spec.logprobs}
            messages: Any = [{"role": "user", "content": spec.prompt}]
            return await self._openai.chat.completions.create(model=spec.model, messages=messages, **fields)
        if spec.logprobs is not None:
            fields["logprobs"] = spec.logprobs
        return await self._openai.completions.create(model=spec.model, prompt=spec.prompt, **fields)


def _piece(answer: Any, spec: StreamSpec) -> Piece:
    usage = None if answer.usage is None else (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    if not answer.choices:
        return Piece(usage=usage)
    choice = answer.choices[0]
    if spec.protocol == "completions":
        text, logprobs = choice.text, _completion_logprobs(choice.logprobs)
    else:
        message = choice.delta if spec.streams else choice.message
        entries = choice.logprobs.content if choice.logprobs else ()
        text, logprobs = message.content, tuple(entry.model_dump() for entry in entries)
    return Piece(text=text or "", logprobs=logprobs, finish_reason=choice.finish_reason, usage=usage)


def _completion_logprobs(found: Any) -> tuple[Any, ...]:
    """One entry for each token out of the lists that run side by side."""
    if found is None:
        return ()
    return tuple(zip(found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True))
