"""Getting a tokenizer's files where large libraries are needed: from the hub, or from a checkpoint without
tokenizer.json.

For: text.py. Does not know: tokenizers. Why a process: the libraries (huggingface_hub, transformers) belong to the
engine's environment, and a host may run in a leaner one (inside Triton). Invariant: what fails there fails here as
ValueError or OSError with the same text.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable

import msgspec

from llmbackend.engine.process.interpreter import command, environment, is_this

logger = logging.getLogger(__name__)

FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "config.json",
)


def download(source: str) -> str:
    """The directory with the tokenizer's files of a hub id."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(source, allow_patterns=list(FILES)))


def convert(directory: str, trust_remote_code: str) -> str:
    """The text of a tokenizer.json, made from older files. trust_remote_code: "0" or "1"."""
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code == "1")
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(converted).__name__} has no fast tokenizer: provide a tokenizer.json")
    return str(backend.to_str())


def call_in(interpreter: str, function: Callable[..., str], *arguments: str) -> str:
    """The function's result, computed by this Python or another one ("" = this one). Raises ValueError or OSError."""
    if is_this(interpreter):
        return function(*arguments)
    logger.info("asking %s for %s(%s)", interpreter, function.__name__, ", ".join(arguments))
    done = subprocess.run(
        [*command(interpreter, __name__), function.__name__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(interpreter),
        check=False,
    )
    if done.returncode:
        raise ValueError(f"{interpreter} could not do it: exit code {done.returncode}, see the log")
    answer = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, str])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["result"]


def main(arguments: list[str]) -> None:
    functions: dict[str, Callable[..., str]] = {"download": download, "convert": convert}
    try:
        answer = {"result": functions[arguments[0]](*arguments[1:])}
    except (ValueError, OSError, ImportError) as error:
        answer = {"error": str(error)}
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
