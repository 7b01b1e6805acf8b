"""docs/fields.md: the fields of both endpoints, as their checks found them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.helpers.server_process import ROOT

from .asking import CHAT, COMPLETIONS
from .fields import OPENAI, VLLM
from .run import DONE, LABEL, REFUSED, Outcome

PAGE = ROOT / "docs" / "fields.md"
_HEAD = """# Fields of the chat and completions APIs

`make fields` sends every field that OpenAI's and vLLM's `/v1/chat/completions` and `/v1/completions` have to a running
server, and writes this page. A field is done when two values of it were seen to give the difference that it promises.
A field that is refused gets 400 with its name in `param`, and the reason in the message; values of it that ask for what
happens anyway are accepted. Labels ask nothing of a model: with `--log-requests` the access log shows them, and no
field is dropped silently. An unknown field is refused.
"""
_SECTIONS = {
    DONE: ("Done", "what was seen to differ"),
    REFUSED: ("Refused", "why"),
    LABEL: ("Labels", "where they are seen"),
}


def page(outcomes: Sequence[Outcome]) -> str:
    parts = [_HEAD]
    for kind, (title, column) in _SECTIONS.items():
        parts.append(f"\n## {title}\n\n| field | of | chat | completions | {column} |\n|---|---|---|---|---|\n")
        found = {outcome.field: outcome for outcome in outcomes if outcome.kind == kind}
        for field, outcome in sorted(found.items()):
            marks = ["yes" if _has(outcomes, name, field, kind) else "" for name in (CHAT, COMPLETIONS)]
            parts.append(f"| `{field}` | {_origin(field)} | {' | '.join(marks)} | {outcome.text} |\n")
    return "".join(parts)


def _has(outcomes: Sequence[Outcome], endpoint: str, field: str, kind: str) -> bool:
    return any((outcome.endpoint, outcome.field, outcome.kind) == (endpoint, field, kind) for outcome in outcomes)


def _origin(field: str) -> str:
    if any(field in names for names in OPENAI.values()):
        return "OpenAI"
    return "vLLM" if any(field in names for names in VLLM.values()) else "here"
