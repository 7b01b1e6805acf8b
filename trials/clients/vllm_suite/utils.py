"""Replaces vLLM's own `tests/utils.py`: the server under test is `llmbackend serve`, with the arguments that the tests
pass to `vllm serve`.

Used by vLLM's tests, which import it as `tests.utils`. Invariant: every model name stands for the one real checkpoint
in LLMBACKEND_SUITE_MODEL.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import openai

ROCM_ENV_OVERRIDES: dict[str, str] = {}
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = None


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str] | str,
        *,
        env_dict: dict[str, str] | None = None,
        **_others: Any,
    ) -> None:
        arguments = vllm_serve_args.split() if isinstance(vllm_serve_args, str) else list(map(str, vllm_serve_args))
        names = [] if any("served-model-name" in one for one in arguments) else ["--served-model-name", model]
        checkpoint = os.environ["LLMBACKEND_SUITE_MODEL"]
        self.uds = next((value for flag, value in itertools.pairwise(arguments) if flag == "--uds"), None)
        ports = [] if self.uds or "--port" in arguments else ["--host=127.0.0.1", "--port=0"]
        arguments = _of_this_model(arguments)
        command = [sys.executable, "-m", "llmbackend.cli", "serve", checkpoint, *names, *ports, *arguments]
        environment = os.environ | (env_dict or {})
        self.host, self.port = "127.0.0.1", 0
        self.proc = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.proc.stdout is not None
        for line in self.proc.stdout:
            if match := re.match(r"http\s+http://[0-9.]+:(\d+)", line):
                self.port = int(match[1])
            if self.port or re.match(r"http\s+unix:", line):
                return
        raise RuntimeError(f"Server exited unexpectedly: code {self.proc.wait()}: {' '.join(command)}")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        if self.proc.stdout is not None:
            self.proc.stdout.close()

    @property
    def url_root(self) -> str:
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_for(), api_key=self.DUMMY_API_KEY, max_retries=0, **options)


def _of_this_model(arguments: list[str]) -> list[str]:
    """Without lengths beyond the model's context, which other models have."""
    longest = int(os.environ.get("LLMBACKEND_SUITE_MAX_MODEL_LEN", "8192"))
    changed = list(arguments)
    for index, word in enumerate(changed[:-1]):
        if word.replace("_", "-") == "--max-model-len" and changed[index + 1].isdigit():
            changed[index + 1] = str(min(int(changed[index + 1]), longest))
    return changed


def __getattr__(name: str) -> Any:
    """Helpers of tests that are not about a server."""

    def missing(*_arguments: Any, **_options: Any) -> Any:
        import pytest

        pytest.skip(f"tests.utils.{name}: not about a server")

    return missing
