"""A mock model that says what its prompt tells it to, so that tests choose the text of tool calls and of reasoning.

Used by tests of what frontends make of a model's text. Independent of engines. Invariant: like the mock model's, its
logits are a function of all tokens so far: after SCRIPT_TEMPLATE's prompt, the text following SAY, byte by byte, then
the end of the sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmbackend.adapter.text.tokenizer import ByteTokenizer
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.engine.step import Int32Array
from llmbackend.testing import mock_model
from llmbackend.testing.mock_model import FloatArray

SAY = "SAY:"
MODEL = "scripted"
"""Of `host_of_scripts`."""
_END_OF_PROMPT = 0x1C
"""Counts as white space."""
SCRIPT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}think {% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.reasoning_content }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.keys() | list }}"
    "{% endfor %}{{ message.tool_call_id }}\n{% endfor %}{% if open_reasoning %}<think>{% endif %}\x1c"
)
"""Shows what reached the template."""
_plain_logits = mock_model.mock_logits


def scripted_logits(token_ids: Int32Array, vocab_size: int) -> FloatArray:
    logits = _plain_logits(token_ids, vocab_size)
    tokens = token_ids.tolist()
    if _END_OF_PROMPT in tokens:
        prompt, output = _split(tokens)
        script = prompt.rpartition(SAY.encode())[2].removesuffix(b"<think>").removesuffix(b"\n")
        logits[script[len(output)] if len(output) < len(script) else ByteTokenizer.EOS] += 1000.0
    return logits


def _split(tokens: list[int]) -> tuple[bytes, list[int]]:
    end = len(tokens) - tokens[::-1].index(_END_OF_PROMPT)
    return bytes(tokens[: end - 1]), tokens[end:]


def follow_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock model follows scripts from now on."""
    monkeypatch.setattr(mock_model, "mock_logits", scripted_logits)


@contextmanager
def host_of_scripts(repository: Path, **engine_args: Any) -> Iterator[InferenceServer]:
    """A host with such a model, which writes calls as Hermes and reasoning as Qwen3 do."""
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    arguments = {"model": "mock", "transport": "inline", "max_model_len": 4096, "chat_template": SCRIPT_TEMPLATE}
    arguments |= {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **engine_args}
    (version / "model.json").write_text(json.dumps(arguments))
    with pytest.MonkeyPatch.context() as monkeypatch:
        follow_scripts(monkeypatch)
        server = InferenceServer(ServerOptions(model_repositories=[repository]))
        server.start()
        yield server
        assert server.stop(timeout_s=20)
