"""Creates tokenizer files with the help of large libraries: from the hub, or for a checkpoint without tokenizer.json.

Used by tokenizer_loading.py, and run by itself as a process. Independent of ModelTokenizer. huggingface_hub and
transformers are in the engine's environment, which may differ from the host's (inside Triton), so these functions can
run in another Python. Invariants: their failures are raised here as ValueError or OSError with the same text; this
module imports little.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from llmbackend.fork_server.client import command, environment, is_this

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
GENERATION_CONFIG_FILE = "generation_config.json"
FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "config.json",
    GENERATION_CONFIG_FILE,
)
WITHOUT_REMOTE_CODE, WITH_REMOTE_CODE = "0", "1"
"""Values of the argument trust_remote_code: whether a checkpoint's own code may run."""
_MAX_ADDED_TOKENS = 16


def remote_code_argument(is_trusted: bool) -> str:
    return WITH_REMOTE_CODE if is_trusted else WITHOUT_REMOTE_CODE


def download(source: str) -> str:
    """Downloads the tokenizer files of a hub id. Returns their directory."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(source, allow_patterns=list(FILES)))


def convert(directory: str, trust_remote_code: str) -> str:
    """A tokenizer.json, as text, created from older files."""
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code == WITH_REMOTE_CODE)
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(converted).__name__} has no fast tokenizer: provide a tokenizer.json")
    return str(backend.to_str())


def rebuilt(directory: str, trust_remote_code: str) -> str:
    """The text of another tokenizer.json if AutoTokenizer tokenises differently from the checkpoint's; otherwise "".

    Some of AutoTokenizer's classes take only the vocabulary from the file and build the rest themselves.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    auto = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code == WITH_REMOTE_CODE)
    backend = getattr(auto, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(auto).__name__} has no fast tokenizer")
    plain = Tokenizer.from_file(f"{directory}/{TOKENIZER_FILE}")
    for tokenizer in (plain, backend):
        tokenizer.no_truncation()
        tokenizer.no_padding()
    probes = probe_texts([token.content for token in plain.get_added_tokens_decoder().values()])
    ids = {
        (text, special): auto.encode(text, add_special_tokens=special) for text in probes for special in (False, True)
    }
    differs = False
    for (text, special), expected in ids.items():
        if backend.encode(text, add_special_tokens=special).ids != expected:
            raise ValueError(f"{type(auto).__name__} does more than a fast tokenizer")
        differs |= plain.encode(text, add_special_tokens=special).ids != expected
    return str(backend.to_str()) if differs else ""


def probe_texts(added_tokens: Sequence[str]) -> list[str]:
    """Texts on which tokenizers differ: spaces everywhere, lines, scripts, added tokens."""
    words = "Hello, world!"
    texts = [
        words,
        f" {words}",
        f"  {words}  twice   {words} ",
        f"{words}\n\n {words}\t{words}\r\n",
        "it's 1234567890 + 3.14 = don't (x_y) -> [z]; def f(a, b):\n        return a",
        "Zürich naïve “quotes” — Привет, мир! 你好，世界。 こんにちは 안녕하세요 مرحبا ไทย",
        "😀👨\u200d👩\u200d👧 e\u0301 \u00a0 \ufb01 ① \u2581x \u200b",
        "<0x41> [INST] a [/INST]",
    ]
    for token in added_tokens[:_MAX_ADDED_TOKENS]:
        texts.append(f"a{token}b {token} c{token}{token}")
        texts.append(f"{token}\n{words}")
    return texts


def run_in(interpreter: str, function: Callable[..., str], *arguments: str) -> str:
    """Runs a function in a Python ("" = this one) and returns its result. Raises ValueError or OSError."""
    if is_this(interpreter):
        return function(*arguments)
    logger.info("asking %s for %s(%s)", interpreter, function.__name__, ", ".join(arguments))
    return result_of(start_in(interpreter, function, *arguments))


def start_in(interpreter: str, function: Callable[..., str], *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a process that runs a function; see `result_of`."""
    return subprocess.Popen(
        [*command(interpreter, __name__), function.__name__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(interpreter),
    )


def result_of(process: subprocess.Popen[bytes], timeout_s: float | None = None) -> str:
    """Waits for a process started by `start_in`. Raises ValueError with its error, subprocess.TimeoutExpired."""
    output, _ = process.communicate(timeout=timeout_s)
    if process.returncode:
        raise ValueError(f"another Python failed, too: exit code {process.returncode}, see the log")
    answer = msgspec.json.decode(output.splitlines()[-1], type=dict[str, str])
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["result"]


def main(*arguments: str) -> None:
    """Runs in the other Python. Prints the result or the error as a line of JSON."""
    functions: dict[str, Callable[..., str]] = {"download": download, "convert": convert, "rebuilt": rebuilt}
    if arguments[-1] == WITHOUT_REMOTE_CODE:
        sys.modules["torch"] = None  # type: ignore[assignment]  # AutoTokenizer imports it, which takes seconds, without need
    try:
        answer = {"result": functions[arguments[0]](*arguments[1:])}
    except Exception as error:  # those libraries raise many types
        answer = {"error": str(error) or type(error).__name__}
    print(msgspec.json.encode(answer).decode())
