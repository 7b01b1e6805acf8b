"""The commands of a chat: /help, /clear, /save and the others.

Used by the chat's loop. Independent of how answers are shown. Invariant: a command that fails says why and changes
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..api_client import ApiError
from .conversation import Conversation, Message, model_names
from .screen import Screen

_ROLES: Final = ("user", "assistant")
_MAX_FILE_BYTES: Final = 64 * 1024 * 1024


class CommandError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Commands, str], str | None]
    argument: str
    help: str


class Commands:
    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self._conversation = conversation
        self._screen = screen
        self._own_files: set[Path] = set()
        """Files written or read by this session, which it may overwrite."""

    def run(self, line: str) -> str | None:
        """Runs a command. Returns a question to be asked now, if any. line: the input from its slash on. Raises
        EOFError to end the chat."""
        name, _, argument = line.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            self._screen.error(f"Unknown command {name}: see /help. Type // to begin a question with /.")
            return None
        try:
            return command.run(self, argument.strip())
        except (CommandError, ApiError) as error:
            self._screen.error(str(error))
            return None

    def help(self, _argument: str) -> None:
        width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            self._screen.note(f"{f'{name} {command.argument}':{width}}  {command.help}")
        self._screen.note(
            'Several lines: end a line with \\, or begin and end with """, or press Alt+Enter, or paste them. '
            "Ctrl+C stops an answer, Ctrl+D ends the chat."
        )

    def clear(self, _argument: str) -> None:
        self._conversation.restart()
        kept = " The system message stays." if self._conversation.system else ""
        self._screen.note(f"The conversation is empty.{kept}")

    def system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == '""' else text
        current = self._conversation.system
        self._screen.note(f"System message: {current}" if current else "There is no system message.")

    def model(self, name: str) -> None:
        names = model_names(self._conversation.client)
        if name and name not in names:
            raise CommandError(f"There is no model '{name}'; the server has {', '.join(names)}.")
        self._conversation.model = name or self._conversation.model
        for each in [name] if name else names:
            self._screen.note(f"{'*' if each == self._conversation.model else ' '} {each}")

    def retry(self, _argument: str) -> str:
        question = self._conversation.take_back()
        if not question:
            raise CommandError("There is no question to repeat.")
        return question

    def stats(self, _argument: str) -> None:
        answers = self._conversation.answers
        tokens = sum(each.num_pieces if each.output_tokens is None else each.output_tokens for each in answers)
        duration_s = sum(each.duration_s for each in answers)
        self._screen.note(
            f"{len(answers)} answers, {tokens} tokens in {duration_s:.1f} s; {len(self._conversation.messages)} "
            "messages are sent along with the next question"
        )
        if speeds := sorted(each.tokens_per_s for each in answers if each.tokens_per_s):
            ttft_s = sorted(each.ttft_s for each in answers)[len(answers) // 2]
            self._screen.note(
                f"median: {speeds[len(speeds) // 2]:.1f} tokens/s, first token after {ttft_s * 1e3:.0f} ms"
            )

    def save(self, name: str) -> None:
        path = _path(name, "/save")
        conversation = self._conversation
        document = {"model": conversation.model, "system": conversation.system, "messages": conversation.messages}
        text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
        try:
            with path.open("w" if path in self._own_files else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise CommandError(f"{path} exists and was not written by this chat: choose another name.") from None
        except (OSError, UnicodeError) as error:
            raise CommandError(f"{path} cannot be written: {error}") from None
        self._own_files.add(path)
        self._screen.note(f"{len(self._conversation.messages)} messages are in {path}.")

    def load(self, name: str) -> None:
        path = _path(name, "/load")
        system, messages = _read(path)
        self._conversation.system = system
        self._conversation.restart(messages)
        self._own_files.add(path)
        self._screen.note(f"{len(messages)} messages are loaded; the model is {self._conversation.model}.")

    def quit(self, _argument: str) -> None:
        raise EOFError


def _path(name: str, command: str) -> Path:
    if not name:
        raise CommandError(f"{command} needs the name of a file.")
    return Path(os.path.expanduser(name)).absolute()


def _read(path: Path) -> tuple[str, list[Message]]:
    """The system message and the other messages. Raises CommandError."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise CommandError(f"{path} has more than {_MAX_FILE_BYTES} bytes.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not a conversation: {error}") from None
    system = document.get("system", "") if isinstance(document, dict) else None
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(system, str) or not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise CommandError(f'{path} is not a conversation: expected {{"system", "messages": [{{"role", "content"}}]}}')
    return system, messages


def _is_message(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == {"role", "content"}
        and value["role"] in _ROLES
        and isinstance(value["content"], str)
    )


COMMANDS: Final[Mapping[str, _Command]] = {
    "/help": _Command(Commands.help, "", "this list"),
    "/clear": _Command(Commands.clear, "", "clear the conversation"),
    "/system": _Command(Commands.system, "[TEXT]", 'show or set the system message; "" removes it'),
    "/model": _Command(Commands.model, "[NAME]", "list the server's models, or switch to another one"),
    "/retry": _Command(Commands.retry, "", "ask the last question again"),
    "/save": _Command(Commands.save, "FILE", "write the conversation, as JSON"),
    "/load": _Command(Commands.load, "FILE", "continue a saved conversation"),
    "/stats": _Command(Commands.stats, "", "tokens and speed of this session"),
    "/quit": _Command(Commands.quit, "", "end the chat, as Ctrl+D does"),
}
