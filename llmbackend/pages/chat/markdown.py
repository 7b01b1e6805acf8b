"""A model's Markdown as HTML that is safe to show: the text is untrusted.

For: the chat page. Does not know: pages. Invariants: the HTML holds only the tags that Markdown has; HTML in the text
is shown as text; nothing in it loads anything by itself (an image becomes a link); links lead to http, https and mail
alone, and tell their target nothing about this page. Blocks are rendered one by one: while an answer grows, what
stands before its last block does not change. (The browser sanitises the HTML once more: DOMPurify, and the page's
policy.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_MAX_BLOCK_CHARACTERS: Final = 64 << 10
"""A longer block is shown as plain text."""
_MAX_HIGHLIGHTED_CHARACTERS: Final = 24 << 10
_LINK: Final = re.compile(r"(https?|mailto):", re.IGNORECASE)
_REORDERING: Final = re.compile("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]")
"""Characters that make code read otherwise than it runs."""
_FORMATTER: Final = HtmlFormatter(nowrap=True, classprefix="hl-")


class _Renderer(RendererHTML):
    """Images as links, code with its language and a button to copy it."""

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        url, name = str(token.attrGet("src") or ""), escape(token.content)
        if not _LINK.match(url):
            return f'<span class="image-link">[image: {name}]</span>'
        return f"<a {_link_attributes(url)}>[image: {name}]</a>"

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        language = tokens[idx].info.split(maxsplit=1)[0] if tokens[idx].info.strip() else ""
        return _code(tokens[idx].content, language)

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _code(tokens[idx].content, "")

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"<a {_link_attributes(str(tokens[idx].attrGet('href') or ''))}>"


def _make_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: bool(_LINK.match(url))  # type: ignore[method-assign]  # the documented way
    return parser


_PARSER: Final = _make_parser()


def last_block(text: str) -> int:
    """Where the last block of `text` begins: what stands before it stays as it is when the text goes on."""
    tokens = [token for token in _PARSER.parse(text) if token.map is not None and token.level == 0]
    line = tokens[-1].map[0] if tokens and tokens[-1].map else 0
    begin = 0
    for _ in range(line):
        begin = text.index("\n", begin) + 1
    return begin


def to_html(text: str) -> str:
    """`text` rendered."""
    if len(text) > _MAX_BLOCK_CHARACTERS:
        return plain(text)
    return str(_PARSER.render(text))


def plain(text: str) -> str:
    """`text` as it is."""
    return f'<p class="plain" dir="auto">{escape(text)}</p>'


def _link_attributes(url: str) -> str:
    target = escape(url)
    return f'href="{target}" title="{target}" rel="noopener noreferrer nofollow" referrerpolicy="no-referrer"'


def _code(code: str, language: str) -> str:
    shown = _REORDERING.sub(lambda found: f"[U+{ord(found[0]):04X}]", code)
    label = escape(language[:32]) or "text"
    return (
        f'<div class="code"><div class="code__bar"><span>{label}</span>'
        f'<button type="button" class="code__copy">Copy</button></div>'
        f'<pre dir="ltr" tabindex="0"><code>{_highlighted(shown, language)}</code></pre></div>'
    )


def _highlighted(code: str, language: str) -> str:
    if language and len(code) <= _MAX_HIGHLIGHTED_CHARACTERS:
        try:
            return str(highlight(code, get_lexer_by_name(language, stripnl=False), _FORMATTER))
        except ClassNotFound:
            pass
    return escape(code)


def highlight_css() -> str:
    """The colours of code in both themes."""
    light: Any = HtmlFormatter(style="default", classprefix="hl-")
    dark: Any = HtmlFormatter(style="github-dark", classprefix="hl-")
    return "\n".join(
        line
        for formatter, place in ((light, "body--light"), (dark, "body--dark"))
        for line in formatter.get_style_defs(f".{place} .code").splitlines()
        if ".hl-" in line
    )
