"""`llmbackend chat`: its flags, one question or a conversation, and its exit code.

For people at a terminal, and for scripts. The protocol is in `conversation.py`. Invariants: with a question from the
command line or a pipe, standard output contains the answer and nothing else; exit code 0 = answered, 1 = not, 130 =
stopped by Ctrl+C.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from ..api_client import ApiClient, ApiError
from ..command_line import PlainHelpCommand
from ..terminal_text import harmless, harmless_line
from .commands import COMMANDS, Commands
from .conversation import Conversation, model_names
from .screen import Screen, prepare, read_choice, read_question, summary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MAX_QUESTION_BYTES = 64 * 1024 * 1024
_SAMPLING = "Sampling (default: the server's)"
_EXIT_INTERRUPTED = 130


@app.command(cls=PlainHelpCommand)
def chat(
    question: Annotated[
        list[str] | None,
        typer.Argument(help="Ask once and print the plain answer; - reads standard input.", show_default=False),
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="Default: the server's only model, or you are asked.")] = "",
    api_key: Annotated[
        str,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Other users can see a flag, but not the variable.", show_default=False
        ),
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    timeout_s: Annotated[float, typer.Option(min=1, help="Maximum silence of the server, seconds.")] = 600.0,
    temperature: Annotated[float | None, typer.Option(min=0, rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Not in OpenAI's own API.", rich_help_panel=_SAMPLING, show_default=False)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Per answer.", rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)] = None,
    reasoning_effort: Annotated[
        str | None, typer.Option(help="For example low, medium or high.", rich_help_panel=_SAMPLING)
    ] = None,
) -> None:
    """Talk to a model of any OpenAI-compatible server."""
    sampling = _given(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    sampling |= _given(reasoning_effort=reasoning_effort)
    is_interactive = not question and sys.stdin.isatty() and sys.stdout.isatty()
    try:
        client = ApiClient(_with_path(url), api_key, timeout_s)
        text = "" if is_interactive else _question(question or ["-"])
        name = model or _choose_model(client, is_interactive)
        conversation = Conversation(client, name, system, sampling)
        if is_interactive:
            _talk(conversation)
        else:
            _answer_once(conversation, text)
    except (ApiError, ValueError) as error:
        typer.echo(f"chat: {harmless(_advised(error))}", err=True)
        raise typer.Exit(1) from None
    except BrokenPipeError:  # `llmbackend chat … | head` must end quietly, even when the interpreter flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, EOFError):
        typer.echo("", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


def _with_path(url: str) -> str:
    """A URL without a path gets OpenAI's."""
    return url if "/" in url.rpartition("://")[2].rstrip("/") else f"{url.rstrip('/')}/v1"


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _question(words: list[str]) -> str:
    """Raises ValueError if there is none."""
    parts = [_standard_input() if word == "-" else word for word in words]
    text = "\n\n".join(parts) if "-" in words else " ".join(parts)
    if not text.strip():
        raise ValueError("the question is empty: give it as an argument or on standard input")
    return text


def _standard_input() -> str:
    data = sys.stdin.buffer.read(_MAX_QUESTION_BYTES + 1)
    if len(data) > _MAX_QUESTION_BYTES:
        raise ValueError(f"standard input has more than {_MAX_QUESTION_BYTES} bytes")
    try:
        return data.decode().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def _choose_model(client: ApiClient, may_ask: bool) -> str:
    names = model_names(client)
    if not names:
        raise ApiError(f"{client.url} serves no chat model")
    if len(names) == 1:
        return names[0]
    if not may_ask:
        raise ValueError(f"the server has several models, expected --model with one of: {', '.join(names)}")
    for number, name in enumerate(names, 1):
        print(f"{number:3d}  {harmless_line(name)}")
    return read_choice(names)


def _advised(error: Exception) -> str:
    text = str(error)
    if text.startswith("no server at"):
        return f"{text}.\nStart one with `llmbackend serve --model DIRECTORY`, or give another server's --url."
    if isinstance(error, ApiError) and error.status in (401, 403):
        return f"{text}\nSet the variable OPENAI_API_KEY, or give --api-key."
    if isinstance(error, ApiError) and error.status == 404 and "/models:" in text:
        return f"{text}\nIs the path of --url right? OpenAI-compatible servers have it at /v1."
    return text


def _answer_once(conversation: Conversation, question: str) -> None:
    """On a terminal, the reasoning is shown too."""
    is_terminal = sys.stdout.isatty()
    screen = Screen(Console(highlight=False))
    try:
        with contextlib.closing(conversation.ask(question)) as pieces:
            for piece in pieces:
                if is_terminal:
                    screen.piece(piece)
                elif not piece.is_reasoning:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
    finally:
        screen.end_of_line()
    if not is_terminal:
        print(flush=True)
    answer = conversation.answers[-1] if conversation.answers else None
    if answer is not None and answer.finish_reason == "length":
        typer.echo("chat: the answer was cut off at the token limit", err=True)


def _talk(conversation: Conversation) -> None:
    """Asks questions and shows answers until the end of the input."""
    screen = Screen(Console(highlight=False))
    commands = Commands(conversation, screen)
    prepare(COMMANDS)
    screen.note(f"{conversation.model} at {conversation.client.url}. /help lists commands, Ctrl+D ends.")
    while True:
        try:
            line = read_question()
            is_command = line.startswith("/") and not line.startswith("//")
            question = commands.run(line) if is_command else line.removeprefix("/")
            if question:
                _show_answer(conversation, screen, question)
        except KeyboardInterrupt:
            print()
        except EOFError:
            return


def _show_answer(conversation: Conversation, screen: Screen, question: str) -> None:
    num_answers = len(conversation.answers)
    try:
        with contextlib.closing(conversation.ask(question)) as pieces:
            for piece in pieces:
                screen.piece(piece)
    except KeyboardInterrupt:
        pass
    except ApiError as error:
        screen.end_of_line()
        screen.error(_advised(error))
    screen.end_of_line()
    if len(conversation.answers) > num_answers:
        screen.note(summary(conversation.answers[-1]))
        print(flush=True)
