"""docs/fields.md: the fields of every endpoint, with the results of their checks."""

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

Every field that OpenAI, Anthropic and vLLM publish for these APIs. `make fields` sends each to a running server and
writes this page. A field is *supported* if two of its values gave the stated difference. A *refused* field gets 400
with its name in `param` and the reason in the message; values that have no effect are accepted. *Labels* do not affect
the model; with `--log-requests` the access log shows them. No field is dropped silently; an unknown one is refused.
"""
_SECTIONS = {
    DONE: ("Supported", "effect"),
    REFUSED: ("Refused", "reason"),
    LABEL: ("Labels", "where they appear"),
}


def page(outcomes: Sequence[Outcome]) -> str:
    parts = [_HEAD, "\n# Chat and completions\n", *_of_both(outcomes)]
    for api in APIS:
        if api.name not in _TOGETHER:
            parts += _of_one(api, [outcome for outcome in outcomes if outcome.endpoint == api.name])
    return "".join(parts)


def _of_both(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for kind, (title, column) in _SECTIONS.items():
        yield f"\n## {title}\n\n| field | origin | chat | completions | {column} |\n|---|---|---|---|---|\n"
        found = {one.field: one for one in outcomes if one.kind == kind and one.endpoint in _TOGETHER}
        for field, outcome in sorted(found.items()):
            marks = ["yes" if _has(outcomes, name, field, kind) else "" for name in _TOGETHER]
            yield f"| `{field}` | {_origin(field)} | {' | '.join(marks)} | {outcome.text} |\n"


def _of_one(api: Api, outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"\n# {api.title}\n\n| field | origin | | effect, or reason of the refusal |\n"
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
