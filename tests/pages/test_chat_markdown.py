"""Markdown of a model: which HTML it can become, and what stays of it while it grows."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from tests.pages.hostile_texts import TEXTS

pytest.importorskip("nicegui")

from llmbackend.pages.chat.markdown import Markdown, last_block, pieces

TAGS = {"p", "h1", "h2", "h3", "em", "strong", "s", "code", "pre", "a", "ul", "ol", "li", "blockquote", "hr", "br"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td", "div", "span", "button"}
ATTRIBUTES = {"class", "href", "title", "rel", "referrerpolicy", "dir", "tabindex", "type", "start", "style"}
SAMPLE = """# Title

A paragraph that
goes on.

- a list

  with a paragraph
- and *another* item

```python
x = "no end yet"

y = 1
```
| a | b |
|---|---|
| 1 | 2 |

Underlined
==========

> quoted
lazily

    indented code

1. one
2. two
"""
FORMULAS = r"""Let \(a_1\) and $x_2^2$ be; it costs $5 and $6, or \$7.

$$
a
+ b
- c
$$

- first
  \[ y = 1 \]
- second

$$
open
- b
"""


def to_html(text: str) -> str:
    return Markdown(text).html({})


class Found(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}


@pytest.mark.parametrize("text", [*TEXTS, SAMPLE, FORMULAS])
def test_html_has_the_tags_of_markdown_alone(text: str) -> None:
    found = Found()
    found.feed(to_html(text))
    assert found.tags <= TAGS
    assert {name for name, _ in found.attributes} <= ATTRIBUTES
    assert all(
        value.startswith(("http://", "https://", "mailto:")) for name, value in found.attributes if name == "href"
    )
    assert all(value.startswith("text-align:") for name, value in found.attributes if name == "style")


@pytest.mark.parametrize(
    "text", [SAMPLE, FORMULAS, *(text for text in TEXTS if len(text) < 1000 and "[ref]:" not in text)]
)
def test_what_stands_before_the_last_block_stays_as_it_is_while_the_text_grows(text: str) -> None:
    whole = to_html(text)
    begins = [last_block(text[:length]) for length in range(0, len(text), 3)]
    assert begins == sorted(begins)
    assert all(whole.startswith(to_html(text[:begin])) for begin in begins)


def test_characters_that_reorder_code_are_shown() -> None:
    assert "[U+202E]" in to_html("```\na\u202eb\n```")


def test_a_block_that_is_too_long_is_plain_text() -> None:
    assert "<strong>" not in to_html("**x** " * 20_000)


def test_a_long_text_is_split_between_its_blocks() -> None:
    text = "A **bold** word.\n\n```\ncode\n\n```\n" * 3000
    parts = list(pieces(text))
    assert "".join(parts) == text and len(parts) > 1
    assert sum(to_html(part).count("<strong>") for part in parts) == 3000
    assert list(pieces("short")) == ["short"] and list(pieces("")) == []


@pytest.mark.parametrize(
    ("text", "formulas"),
    [
        (r"\(a_1\), \[b\], $c$ and $$d$$", ["a_1", "b", "c", "d"]),
        (r"`$code$`, ``\(code\)``, $5 and $6, \$7 and $ x $", []),
        ("$$\na\n+ b\n- c\n$$", ["a\n+ b\n- c"]),
        ("> \\[\n> q\n> \\]", ["q"]),
        ("$$\nno\n\nend\n$$", []),
        ("```\n$$\nx\n$$\n```", []),
        (r"$a < b$ and $\text{\$}$", ["a < b", r"\text{\$}"]),
    ],
)
def test_formulas_are_told_from_prices_and_code(text: str, formulas: list[str]) -> None:
    found = re.findall(r'class="math(?: math--display)?" dir="ltr">([^<]*)<', to_html(text))
    assert [unescape(formula) for formula in found] == formulas


def test_an_item_of_a_task_list_says_whether_it_is_done() -> None:
    html = to_html("- [ ] one\n- [x] two **bold**\n- [y] three")
    assert re.findall(r"(☐|☑).*?</span>(\w+)", html) == [("☐", "one"), ("☑", "two")]
    assert "[y] three" in html and "<strong>bold</strong>" in html
