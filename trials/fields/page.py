"""docs/fields.md: the fields of every endpoint, as their checks found them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.helpers.server_process import ROOT

from .api import Api
from .asking import CHAT, COMPLETIONS
from .fields import APIS
from .run import DONE, LABEL, REFUSED, Outcome

PAGE = ROOT / "docs" / "fields.md"
_TOGETHER = (CHAT, COMPLETIONS)
_HEAD = """# Fields of the APIs

`make fields` sends every field that OpenAI, Anthropic and vLLM publish for these APIs to a running server, and writes
this page. A field is done when two values of it were seen to give the difference that it promises.
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
    parts = [_HEAD, "\n# Chat and completions\n", *_of_both(outcomes)]
    for api in APIS:
        if api.name not in _TOGETHER:
            parts += _of_one(api, [outcome for outcome in outcomes if outcome.endpoint == api.name])
    return "".join(parts)


def _of_both(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for kind, (title, column) in _SECTIONS.items():
        yield f"\n## {title}\n\n| field | of | chat | completions | {column} |\n|---|---|---|---|---|\n"
        found = {one.field: one for one in outcomes if one.kind == kind and one.endpoint in _TOGETHER}
        for field, outcome in sorted(found.items()):
            marks = ["yes" if _has(outcomes, name, field, kind) else "" for name in _TOGETHER]
            yield f"| `{field}` | {_origin(field)} | {' | '.join(marks)} | {outcome.text} |\n"


def _of_one(api: Api, outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"\n# {api.title}\n\n| field | of | | what was seen to differ, why it is refused, where it is seen |\n"
    yield "|---|---|---|---|\n"
    for kind in _SECTIONS:
        for outcome in sorted(outcomes, key=lambda one: one.field):
            if outcome.kind == kind:
                yield f"| `{outcome.field}` | {api.origin(outcome.field)} | {kind} | {outcome.text} |\n"


def _has(outcomes: Sequence[Outcome], endpoint: str, field: str, kind: str) -> bool:
    return any((outcome.endpoint, outcome.field, outcome.kind) == (endpoint, field, kind) for outcome in outcomes)


def _origin(field: str) -> str:
    origins = {api.origin(field) for api in APIS if api.name in _TOGETHER}
    return min(origins, key=["OpenAI", "vLLM", "here"].index)
