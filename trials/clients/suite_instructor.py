"""Instructor: pydantic models from a chat, in each of its modes for OpenAI's API: whole, partial and in lists.

Part of `make clients`. Independent of the server. Invariant: no retries, so that each answer must be right the first
time.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal

import instructor
import openai
import pytest
from pydantic import UUID4, BaseModel, ConfigDict, Field, SecretStr

HELLO: list[Any] = [{"role": "user", "content": "How is the weather? Answer in JSON."}]
MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA")


class Weather(BaseModel):
    """The weather."""

    sky: Literal["clear", "grey"]
    degrees: int = Field(ge=0, le=40)


def client(base_url: str, mode: str) -> Any:
    raw = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))


def options(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": HELLO, "max_retries": 0, "temperature": 0} | more


@pytest.mark.parametrize("mode", MODES)
def test_whole(base_url: str, mode: str) -> None:
    assert isinstance(client(base_url, mode).chat.completions.create(response_model=Weather, **options()), Weather)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial(base_url: str, mode: str) -> None:
    """A stream of ever more complete objects; the last is the whole one."""
    made = client(base_url, mode)
    *_, last = made.chat.completions.create_partial(response_model=Weather, **options())
    assert Weather.model_validate(last.model_dump())


def test_completion_beside_the_object(base_url: str) -> None:
    found, completion = client(base_url, "TOOLS").chat.completions.create_with_completion(
        response_model=Weather, **options()
    )
    assert isinstance(found, Weather) and completion.usage.completion_tokens > 0


class Record(BaseModel):
    """Of types whose schemas have formats and keywords of their own. Closed: a small model would invent members."""

    model_config = ConfigDict(extra="forbid")
    tags: Annotated[set[Literal["a", "b", "c", "d", "e", "f"]], Field(max_length=3)]
    home: Annotated[Path, Field(json_schema_extra={"maxLength": 4})]
    password: Annotated[SecretStr, Field(max_length=4)]
    id: UUID4
    network: IPv4Network
    sizes: dict[Literal["x", "y"], bool]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_types_beyond_json(base_url: str, mode: str) -> None:
    made = client(base_url, mode)
    assert isinstance(made.chat.completions.create(response_model=Record, **options(max_tokens=500)), Record)


async def test_asynchronous(base_url: str) -> None:
    raw = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    made: Any = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    assert isinstance(await made.chat.completions.create(response_model=Weather, **options()), Weather)


def test_a_plain_answer(base_url: str) -> None:
    answer = client(base_url, "TOOLS").chat.completions.create(response_model=None, **options(max_tokens=8))
    assert answer.choices[0].message.content
