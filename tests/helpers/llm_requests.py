"""The requests of the adapter's and the server's state machines, and their undisturbed results.

For judging streams that survived something. A few fixed kinds, mixed in all that an engine's death must carry over:
seeds, penalties, stop strings, minimum lengths, logprobs, text beyond ASCII, streams and whole answers.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.llm_host import Call, LlmHost, llm_host

NUM_KINDS = 16
MAX_MODEL_LEN = 64
POISON = 1
"""A byte that is no text: the mock model's token of chr(1)."""


@dataclass(frozen=True)
class Answer:
    """All that a request gave up to some moment."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    cumulative_logprob: float
    prompt_logprobs: tuple[bytes, ...]
    """One where they were asked for and something came; else none."""

    def is_beginning_of(self, whole: Answer) -> bool:
        if self.prompt_logprobs not in ((), whole.prompt_logprobs):
            return False
        return whole.text.startswith(self.text) and whole.token_ids[: len(self.token_ids)] == self.token_ids


def prompt(kind: int) -> str:
    return ["a", "request ", "zażółć gęślą ", "x" * 17][kind % 4] + str(kind)


def sampling(kind: int) -> dict[str, Any]:
    return {
        "max_tokens": [9, 24, 12, 16, 20][kind % 5],
        "min_tokens": [0, 8][kind // 2 % 2],
        "temperature": [0, 1.0, 0.7][kind % 3],
        "seed": kind,
        "repetition_penalty": [1.0, 1.3][kind // 3 % 2],
        "frequency_penalty": [0.0, 0.4][kind % 2],
        "logprobs": kind % 2,
        "prompt_logprobs": 1 if kind % 3 == 0 else None,
        "stop": ["zzz", f"{kind % 10}"],
        "ignore_eos": kind % 4 == 1,
    }


def start(host: LlmHost, kind: int, *, poison: bool = False, **options: Any) -> Call:
    """Sends a request of this kind; a poisonous one kills an engine of which it was said so."""
    return host.start(
        text_input=prompt(kind) + chr(POISON) * poison,
        stream=kind % 2 == 0,
        sampling=sampling(kind),
        return_output_ids=True,
        return_logprobs=True,
        return_finish_reason=True,
        return_cumulative_logprob=True,
        **options,
    )


def answer(call: Call) -> Answer:
    """What came so far; an error that ended the call is not part of it."""
    tensors = [tensor for response in call.responses if response.error is None for tensor in response.outputs]

    def every(name: str) -> list[Any]:
        return [item for tensor in tensors if tensor.name == name for item in tensor.data.tolist()]

    return Answer(
        "".join(text.decode() for text in every("text_output")),
        tuple(every("output_ids")),
        every("finish_reason")[-1].decode() if tensors else "",
        every("cumulative_logprob")[-1] if tensors else 0.0,
        tuple(every("prompt_logprobs")),
    )


@functools.cache
def undisturbed() -> list[Answer]:
    """What each kind gives, alone and in peace."""
    with tempfile.TemporaryDirectory() as directory, llm_host(Path(directory), max_model_len=MAX_MODEL_LEN) as host:
        return [answer(start(host, kind).wait()) for kind in range(NUM_KINDS)]
