"""The input of a custom tool's call is the string that the model wrote as JSON, however its text is cut."""

from __future__ import annotations

import json
from random import Random

import pytest

from llmbackend.frontends.openai.responses_api.output_items import CustomInput

TEXTS = (
    "",
    "*** Begin Patch\n+\tx = \"\\n\" 'é' 🌦\r\n*** End Patch",
    '\\"}\u2028\x00\ufffd{"input":"',
    "🌦" * 3 + "\\",
)


def read(arguments: str, random: Random | None = None) -> str:
    decoder, found, at = CustomInput(), [], 0
    while at < len(arguments):
        size = len(arguments) if random is None else random.randint(0, 4)
        found.append(decoder.push(arguments[at : at + size]))
        at += size
    text = "".join([*found, decoder.finish()])
    text.encode()
    return text


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_the_string_comes_out(text: str, ascii_only: bool) -> None:
    random = Random(text)
    for form in ('{"input":%s}', ' { "input" :\n%s } ', '{"input": %s, "more": "x"}'):
        arguments = form % json.dumps(text, ensure_ascii=ascii_only)
        assert read(arguments) == text
        assert all(read(arguments, random) == text for _ in range(20))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", ""),
        ("", ""),
        ('{"inp', ""),
        ('{"input": ', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\ud83c', "a"),
        ('{"input": "a\\ud83cb"}', "a\ufffdb"),
        ('{"input": "a\\udf26b"}', "a\ufffdb"),
        ('{"input": "a\\uzzzzb"}', "a\\uzzzzb"),
        ('{"x": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 7}', '{"input": 7}'),
        ("plain", "plain"),
    ],
)
def test_other_forms(arguments: str, expected: str) -> None:
    random = Random(arguments)
    assert read(arguments) == expected
    assert all(read(arguments, random) == expected for _ in range(20))
