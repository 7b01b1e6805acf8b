"""Tries an untrusted chat template in a process with little memory and time, before the server compiles it.

Used by gguf_models.py, which takes templates from single files that anybody may have made. Independent of such files.
Invariants: the process ends within its limits for any template. A template that raises an error for the conversations
tried here is accepted, because many require roles in a certain order. One that misbehaves only for other conversations
is accepted too: it is trusted as much as the weights.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from typing import Any, Final

import msgspec

from llmbackend.fork_server.client import command, environment

CPU_S: Final = 5
"""For all conversations together; rendering takes milliseconds."""
WALL_S: Final = 120.0
MEMORY_BYTES: Final = 2 << 30
"""Of address space."""
MAX_PROMPT_CHARACTERS: Final = 1 << 20
_USER: Final = {"role": "user", "content": "Hello!"}
_ANSWER: Final = {"role": "assistant", "content": "Hi."}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
_CONVERSATIONS: Final[tuple[tuple[list[dict[str, Any]], list[Any] | None], ...]] = (
    ([_USER], None),
    ([{"role": "system", "content": "Be brief."}, _USER, _ANSWER, _USER], None),
    ([_USER], [_TOOL]),
)


class TemplateRefusedError(ValueError):
    """Why a template is not used."""


def check_template(source: str, special_tokens: dict[str, str], interpreter: str = "") -> None:
    """interpreter: a Python with this program's libraries ("" = this one). Raises TemplateRefusedError, OSError."""
    request = msgspec.json.encode({"source": source, "special_tokens": special_tokens, "cpu_s": CPU_S})
    try:
        done = subprocess.run(
            command(interpreter, __name__),
            input=request,
            capture_output=True,
            timeout=WALL_S,
            env=environment(interpreter),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateRefusedError(f"it does not end within {WALL_S:.0f} s") from None
    if done.returncode:
        said = done.stdout.decode(errors="replace").strip()
        if not said and done.returncode > 0:  # the other Python lacks a library
            said = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:])
        raise TemplateRefusedError(said or f"rendering it takes more than {CPU_S} s, or too much memory")


def main() -> None:
    """Runs in the other process. Prints why the template is refused, and exits with status 1."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Any])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from .chat_template import ChatTemplate

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    limit_s = math.ceil(time.process_time()) + request["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 1))
    try:
        template = ChatTemplate(request["source"], request["special_tokens"])
        for messages, tools in _CONVERSATIONS:
            _render(template, messages, tools)
    except MemoryError:
        _end(f"it takes more than {MEMORY_BYTES >> 20} MiB")
    except (ValueError, RecursionError, OverflowError) as error:  # does not compile
        _end(" ".join(str(error).split())[:300] or type(error).__name__)


def _render(template: Any, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
    from llmbackend.core.backend_api import TritonError

    try:
        prompt = template.render(messages, tools=tools)
    except TritonError:  # requires other roles, or does not support tools
        return
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        _end(f"it turns a short conversation into {len(prompt)} characters, expected at most {MAX_PROMPT_CHARACTERS}")


def _end(reason: str) -> None:
    print(reason)
    sys.stdout.flush()
    raise SystemExit(1)
