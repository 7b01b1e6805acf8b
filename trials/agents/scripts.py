"""The scripted model's output, turn by turn, in the tool-call format of a model family.

Used by tests of agents and by the engine's side (in_engine/). Independent of servers and agents. Invariant: a turn is
selected by the conversation alone: by the number of tool results in its prompt; the last result (or, without any, the
prompt) must contain what the turn expects, so that a result that did not reach the model ends the session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

SCRIPT_VARIABLE = "LLMBACKEND_TEST_SCRIPT"
"""The script's file, for the engine's process."""
RESULT_MARK = "\x1d"
"""Before each tool result of a prompt. It counts as white space."""
END_OF_PROMPT = "\x1c"
UNEXPECTED = "The script expected another result of its tool: "

CHAT_TEMPLATE = (
    "{% if tools %}<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}" + RESULT_MARK + "{% endif %}"
    "<{{ message.role }}>{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}\n"
    "{% endfor %}" + END_OF_PROMPT
)
"""Shows the model all that a conversation holds."""


class CallFormat(Protocol):
    """How a family of models writes one call; `parser` is vLLM's name of it."""

    @property
    def parser(self) -> str: ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> str: ...


class Hermes:
    parser = "hermes"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        text = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{text}\n</tool_call>"


class Qwen3Coder:
    parser = "qwen3_coder"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@dataclass(frozen=True)
class Turn:
    """after: how many results the prompt holds. expects: what the last of them must hold. says: the model's text."""

    after: int
    expects: str
    says: str


def write_script(path: Path, turns: Sequence[Turn]) -> None:
    path.write_text(json.dumps([asdict(turn) for turn in turns]))


def read_script(path: Path) -> list[Turn]:
    return [Turn(**turn) for turn in json.loads(path.read_text())]


def line_after(prompt: bytes, turns: Sequence[Turn]) -> bytes:
    """What the model says after this prompt, END_OF_PROMPT left out."""
    *_, last = results = prompt.split(RESULT_MARK.encode())
    for turn in turns:
        if turn.after == len(results) - 1 and turn.expects.encode() in last:
            return turn.says.encode()
    return (UNEXPECTED + repr(last[-400:])).encode()
