r"""markdown-it rules for formulas and task lists.

Used by markdown.py. Independent of how formulas look (static/math.js renders them with KaTeX). Invariants: formulas are
escaped text in the HTML; `\(…\)`, `\[…\]`, `$…$` and `$$…$$` are formulas, "$5 and $6" is not; an unclosed formula ends
at a blank line and is text, so that earlier blocks do not change while the text grows; an inline formula ends within
MAX_CHARACTERS. Sources: Pandoc's `tex_math_dollars` (characters next to a `$`); GitHub's task lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

MAX_CHARACTERS: Final = 4096
_CLOSING: Final = {"\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$"}
_DISPLAYED: Final = ("\\[", "$$")
_TASK: Final = re.compile(r"\[([ xX])\]\s+")


def add_rules(parser: MarkdownIt) -> None:
    parser.inline.ruler.before("escape", "math", _inline_formula)
    parser.block.ruler.before(
        "fence", "math_block", _formula_block, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )
    parser.core.ruler.after("inline", "tasks", _mark_tasks)
    parser.add_render_rule("math_inline", _render_inline)
    parser.add_render_rule("math_block", _render_block)
    parser.add_render_rule("math_open", _render_open)
    parser.add_render_rule("task_box", _render_task_box)


def _inline_formula(state: StateInline, silent: bool) -> bool:
    opening = _opening(state.src, state.pos)
    if opening is None:
        return False
    begin = state.pos + len(opening)
    end = _end(state.src, begin, min(state.posMax, begin + MAX_CHARACTERS), _CLOSING[opening])
    text = state.src[begin:end]
    if end < 0 or not text.strip() or (opening == "$" and not _is_in_dollars(state.src, begin, end)):
        return False
    if not silent:
        token = state.push("math_inline", "", 0)
        token.content, token.markup = text, opening
    state.pos = end + len(_CLOSING[opening])
    return True


def _opening(text: str, position: int) -> str | None:
    for length in (2, 1):
        if (found := text[position : position + length]) in _CLOSING:
            return found
    return None


def _end(text: str, begin: int, limit: int, closing: str) -> int:
    """Index of the closing delimiter; -1 = none."""
    end = text.find(closing, begin, limit)
    while end > 0 and closing[0] == "$" and text[end - 1] == "\\":
        end = text.find(closing, end + 1, limit)
    return end


def _is_in_dollars(text: str, begin: int, end: int) -> bool:
    """Whether the text between single dollars can be a formula: "$5 and $6" are prices."""
    return not (text[begin].isspace() or text[end - 1].isspace() or text[end + 1 : end + 2].isdigit())


def _formula_block(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    begin = state.bMarks[start_line] + state.tShift[start_line]
    opening = state.src[begin : begin + 2]
    if opening not in _DISPLAYED or state.is_code_block(start_line):
        return False
    line, text = start_line, state.src[begin + 2 : state.eMarks[start_line]].rstrip()
    while not text.endswith(_CLOSING[opening]):
        line += 1
        if _CLOSING[opening] in text or (line < end_line and not _continues_block(state, line)):
            return False
        if line >= end_line:
            return line >= len(state.bMarks) - 1 and _take(state, "math_open", start_line, line, silent)
        text = state.src[state.bMarks[line] : state.eMarks[line]].rstrip()
    return _take(state, "math_block", start_line, line + 1, silent)


def _continues_block(state: StateBlock, line: int) -> bool:
    """Whether a line continues the block of the previous line."""
    return not state.isEmpty(line) and state.sCount[line] >= state.blkIndent


def _take(state: StateBlock, kind: str, start_line: int, end_line: int, silent: bool) -> bool:
    if not silent:
        token = state.push(kind, "", 0)
        token.block = True
        token.content = state.getLines(start_line, end_line, state.blkIndent, False).strip()
        token.map = [start_line, end_line]
        state.line = end_line
    return True


def _mark_tasks(state: StateCore) -> None:
    for item, paragraph, inline in zip(state.tokens, state.tokens[1:], state.tokens[2:], strict=False):
        found = _TASK.match(inline.content) if inline.type == "inline" else None
        if found and inline.children and (item.type, paragraph.type) == ("list_item_open", "paragraph_open"):
            item.attrSet("class", "task")
            inline.children[0].content = inline.children[0].content[found.end() :]
            inline.children.insert(0, Token("task_box", "", 0, meta={"is_done": found[1] != " "}))


def _render_inline(renderer: Any, tokens: Sequence[Token], idx: int, *_: Any) -> str:
    return _formula(tokens[idx].content, is_displayed=tokens[idx].markup in _DISPLAYED, tag="span")


def _render_block(renderer: Any, tokens: Sequence[Token], idx: int, *_: Any) -> str:
    return _formula(tokens[idx].content[2:-2], is_displayed=True, tag="div")


def _render_open(renderer: Any, tokens: Sequence[Token], idx: int, *_: Any) -> str:
    return f'<p class="plain">{escape(tokens[idx].content)}</p>\n'


def _formula(text: str, *, is_displayed: bool, tag: str) -> str:
    name = "math math--display" if is_displayed else "math"
    return f'<{tag} class="{name}" dir="ltr">{escape(text.strip())}</{tag}>'


def _render_task_box(renderer: Any, tokens: Sequence[Token], idx: int, *_: Any) -> str:
    box, spoken = ("☑", "done: ") if tokens[idx].meta["is_done"] else ("☐", "to do: ")
    return f'<span class="task__box">{box}</span><span class="hidden-text">{spoken}</span>'
