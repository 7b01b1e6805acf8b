"""Markdown: converts a model's untrusted Markdown to safe HTML.

Used by the chat page. Independent of pages. Invariants: the HTML contains only Markdown's tags; HTML in the text is
shown as text; nothing is loaded automatically (an image becomes a link); links go only to http, https and mailto,
without referrer. While an answer grows, only its last block changes. (The browser sanitises the HTML again: DOMPurify,
and the page's policy.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from .highlighting import Code
from .markdown_rules import add_rules

_MAX_BLOCK_CHARACTERS: Final = 64 << 10
"""A longer block is shown as plain text."""
_LINK: Final = re.compile(r"(https?|mailto):", re.IGNORECASE)
_MAX_LANGUAGE_CHARACTERS: Final = 32
_REORDERING: Final = re.compile("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")
"""Characters that can make code look different from what it does."""
_HIGHLIGHTED: Final = "highlighted"
"""Key in the renderer's environment: HTML by Code."""


class _Renderer(RendererHTML):
    """Renders images as links, and code with its language and a copy button."""

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        url, name = str(token.attrGet("src") or ""), escape(token.content)
        if not _LINK.match(url):
            return f'<span class="image-link">[image: {name}]</span>'
        return f"<a {_link_attributes(url)}>[image: {name}]</a>"

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        code = _code(tokens[idx])
        return _code_html(code, env.get(_HIGHLIGHTED, {}).get(code))

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _code_html(_code(tokens[idx]), None)

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"<a {_link_attributes(str(tokens[idx].attrGet('href') or ''))}>"


def _make_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
    add_rules(parser)
    parser.validateLink = lambda url: bool(_LINK.match(url))  # type: ignore[method-assign]  # the documented way
    return parser


_PARSER: Final = _make_parser()


def last_block(text: str) -> int:
    """Start of the last block of `text`; the text before it renders the same when the text grows."""
    tokens = [token for token in _PARSER.parse(text) if token.map is not None and token.level == 0]
    line = tokens[-1].map[0] if tokens and tokens[-1].map else 0
    begin = 0
    for _ in range(line):
        begin = text.index("\n", begin) + 1
    return begin


def pieces(text: str) -> Iterator[str]:
    """`text`, split between blocks if it is too long to be rendered at once. A block that is too long is in the last
    piece, with all that follows it."""
    while len(text) > _MAX_BLOCK_CHARACTERS and (begin := last_block(text[:_MAX_BLOCK_CHARACTERS])):
        yield text[:begin]
        text = text[begin:]
    if text:
        yield text


class Markdown:
    """A text, parsed once."""

    def __init__(self, text: str, *, is_plain: bool = False) -> None:
        """is_plain: shows the text without rendering, as is done for texts above _MAX_BLOCK_CHARACTERS."""
        self.text = text
        is_plain |= len(text) > _MAX_BLOCK_CHARACTERS
        self._tokens = None if is_plain else _PARSER.parse(text)
        codes = (_code(token) for token in self._tokens or () if token.type == "fence")
        self.codes = [code for code in codes if code.language]
        """Pieces of code whose language is named."""

    def html(self, highlighted: Mapping[Code, str]) -> str:
        """highlighted: HTML of highlighted `codes`."""
        if self._tokens is None:
            return f'<p class="plain" dir="auto">{escape(self.text)}</p>'
        return str(_PARSER.renderer.render(self._tokens, _PARSER.options, {_HIGHLIGHTED: highlighted}))


def _link_attributes(url: str) -> str:
    target = escape(url)
    return f'href="{target}" title="{target}" rel="noopener noreferrer nofollow" referrerpolicy="no-referrer"'


def _code(token: Token) -> Code:
    language = token.info.split(maxsplit=1)[0][:_MAX_LANGUAGE_CHARACTERS] if token.info.strip() else ""
    return Code(language, _REORDERING.sub(lambda found: f"[U+{ord(found[0]):04X}]", token.content))


def _code_html(code: Code, html: str | None) -> str:
    label = escape(code.language) or "text"
    return (
        f'<div class="code"><div class="code__bar"><span>{label}</span>'
        f'<button type="button" class="code__copy">Copy</button></div>'
        f'<pre dir="ltr" tabindex="0"><code>{escape(code.text) if html is None else html}</code></pre></div>'
    )
