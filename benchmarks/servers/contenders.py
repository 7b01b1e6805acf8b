"""The servers that are compared: the command line of each for a model and a kind of weights.

Used by the campaign. Independent of loads. Invariant: the flags are those recommended by the server's own documentation
for many streams, and each server may run as many concurrently as the largest load has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..entries import OURS
from ..environments import LLAMA_CPP_PYTHON, VLLM_VERSION, Environments

SERVED_NAME = "bench"
STREAMS = 64
CONTEXT_TOKENS = 2048
Kind = Literal["bfloat16", "8 bits", "4 bits"]
KINDS: tuple[Kind, ...] = ("8 bits", "bfloat16", "4 bits")


@dataclass(frozen=True)
class Contender:
    """files: what it serves for each kind of weights, with {} for the model; of a kind that is missing it has none.
    options: its own for that kind."""

    name: str
    environment: str
    version: str
    files: dict[Kind, str]
    options: dict[Kind, tuple[str, ...]]
    command: Callable[[Environments, Path, int], list[str]]

    def words(self, environments: Environments, model: Path, port: int, kind: Kind) -> list[str]:
        return [*self.command(environments, model, port), *self.options.get(kind, ())]


def _common(model: Path, port: int) -> list[str]:
    """Of ours and vLLM, which have the same flags."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
    return [str(model), *flags, "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(STREAMS)]


def _ours(environments: Environments, model: Path, port: int) -> list[str]:
    return [str(environments.python("ours")), "-m", "llmbackend.cli", "serve", *_common(model, port)]


def _vllm(environments: Environments, model: Path, port: int) -> list[str]:
    return [str(environments.folder("vllm") / "bin" / "vllm"), "serve", *_common(model, port)]


def _llama_server(environments: Environments, model: Path, port: int) -> list[str]:
    command = [str(environments.llama_cpp_binaries / "llama-server"), "--model", str(model), "--alias", SERVED_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(os.cpu_count() or 1)]
    return [*command, "--parallel", str(STREAMS), "--ctx-size", str(STREAMS * 1024), "--no-kv-unified"]


CONTENDERS: Sequence[Contender] = (
    Contender(
        name=OURS,
        environment="ours",
        version="0.1.0",
        files={"bfloat16": "{}", "8 bits": "{}", "4 bits": "{}-q4_0.gguf"},
        options={"8 bits": ("--quantization", "int8")},
        command=_ours,
    ),
    Contender(
        name="vLLM",
        environment="vllm",
        version=f"{VLLM_VERSION} (CPU)",
        files={"bfloat16": "{}", "8 bits": "{}-w8a8"},
        options={},
        command=_vllm,
    ),
    Contender(
        name="llama.cpp",
        environment="llama-server",
        version=f"llama-server of {LLAMA_CPP_PYTHON.replace('==', ' ')}",
        files={"bfloat16": "{}-f16.gguf", "8 bits": "{}-q8_0.gguf", "4 bits": "{}-q4_0.gguf"},
        options={},
        command=_llama_server,
    ),
)
