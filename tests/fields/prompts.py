"""Checks of the fields that make the prompt."""

from __future__ import annotations

from .asking import Endpoint, said
from .table import Row, promise


@promise("another conversation gets another answer")
def _messages(api: Endpoint) -> None:
    assert api.ask().text != api.ask(messages=said("What is a seed?")).text


@promise("another prompt gets another answer; text, token ids and lists of both")
def _prompt(api: Endpoint) -> None:
    assert api.ask().text != api.ask(prompt="The seed").text
    assert api.ask(prompt=[7, 8, 9]).usage["prompt_tokens"] == 3
    assert api.ask(prompt=["The seed", "A block of the"]).texts == [api.ask(prompt="The seed").text, api.ask().text]


@promise("without it the template does not open the assistant's turn")
def _add_generation_prompt(api: Endpoint) -> None:
    with_it, without = (api.ask(add_generation_prompt=value).usage["prompt_tokens"] for value in (True, False))
    assert with_it > without


@promise("the text begins with the prompt")
def _echo(api: Endpoint) -> None:
    assert api.ask(echo=True).text == "A block of the" + api.ask(echo=False).text
    assert api.streamed(echo=True) == api.ask(echo=True).texts


CHAT_PROMPTS: dict[str, Row] = {"messages": _messages, "add_generation_prompt": _add_generation_prompt}
COMPLETION_PROMPTS: dict[str, Row] = {"prompt": _prompt, "echo": _echo}
