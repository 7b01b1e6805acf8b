"""Which keywords of a request's schemas are not enforced, and whether the finished answer satisfies the schemas anyway.

For: generations, and the endpoints of all APIs, which report it in headers and in one line of the log. Does not know:
HTTP, how a grammar is made. Invariants: places are named in the client's own fields; if everything is enforced, no
delta is kept and nothing is validated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import quote

import orjson

from .answer_plan import AnswerPlan
from .answers import Answer
from .errors import JsonObject
from .requests import GenerationRequest
from .response_format import STRUCTURED_OUTPUTS
from .schema_validation import Budget, NotJudgedError, violation
from .tensors import Delta

log = logging.getLogger(__name__)
NOT_ENFORCED: Final = "x-schema-not-enforced"
"""Places of keywords: `tools[0].function.parameters#/properties/tags/uniqueItems, …`."""
VALID: Final = "x-schema-valid"
"""`true`, `false`, or `unknown` where it could not be judged."""
_MAX_HEADER_CHARS: Final = 2048
_MORE: Final = ", ..."


class SchemaReport:
    """Of one request. Used on the event loop, but for `judge`, which is called at the end, in a thread."""

    def __init__(self, request: GenerationRequest, plan: AnswerPlan | None) -> None:
        self._request = request
        self._plan = plan
        self._places: dict[str, None] = dict.fromkeys(plan.not_enforced if plan is not None else ())
        self._deltas: dict[int, list[Delta]] = {}
        """Of each choice; only if the answer will be judged."""

    @property
    def is_needed(self) -> bool:
        return bool(self._places)

    def add(self, choice: int, delta: Delta) -> None:
        for place in delta.not_enforced:
            self._places.setdefault(self._own(place))
        if self._places:
            self._deltas.setdefault(choice, []).append(delta)

    def headers(self) -> dict[str, str]:
        """What is known before the answer."""
        if not self._places:
            return {}
        value = ", ".join(quote(place, safe="/#[].$~") for place in self._places)
        if len(value) > _MAX_HEADER_CHARS:
            value = value[:_MAX_HEADER_CHARS].rpartition(", ")[0] + _MORE
        return {NOT_ENFORCED: value}

    def judge(self, response_id: str) -> dict[str, str]:
        """What is known after the answer; also logs it. The work is in proportion to the answer."""
        budget = Budget()
        faults: list[str] = []
        unknown: list[str] = []
        for choice, deltas in sorted(self._deltas.items()):
            try:
                faults += [f"choice {choice}: {fault}" for fault in self._faults(response_id, choice, deltas, budget)]
            except NotJudgedError as error:
                unknown.append(f"choice {choice}: {error}")
        verdict = "false" if faults else "unknown" if unknown or not self._deltas else "true"
        result = {
            "true": "the answer satisfies its schema",
            "false": "; ".join(faults[:4]),
            "unknown": f"not judged: {'; '.join(unknown[:4])}",
        }
        level = logging.WARNING if faults else logging.INFO
        places = ", ".join(list(self._places)[:8])
        log.log(level, "%s: not enforced: %s; %s", response_id, places, result[verdict])
        return self.headers() | {VALID: verdict}

    def _faults(self, response_id: str, choice: int, deltas: Sequence[Delta], budget: Budget) -> Iterator[str]:
        if deltas[-1].finish_reason == "length":
            yield "was cut off at its length"
            return
        message = self._message(response_id, choice, deltas)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        calls += [message["function_call"]] if "function_call" in message else []
        schemas = self._plan.schemas if self._plan is not None else {}
        for call in calls:
            if fault := violation(schemas.get(call["name"], True), call["arguments"], budget):
                yield f"the arguments of '{call['name']}': {fault}"
        schema = None if calls else self._schema_of_text()
        if schema is not None and (fault := violation(schema, message["content"] or "", budget)):
            yield fault

    def _message(self, response_id: str, choice: int, deltas: Sequence[Delta]) -> JsonObject:
        if self._plan is None:
            return {"content": "".join(delta.text for delta in deltas)}
        answer = Answer(self._plan, response_id, choice)
        for delta in deltas:
            answer.add(delta)
        return answer.message()

    def _schema_of_text(self) -> Any:
        """The schema that the request gives for the answer's text. Raises NotJudgedError for one in structural tags."""
        sampling = self._request.sampling
        wanted = sampling.get(STRUCTURED_OUTPUTS)
        if (isinstance(wanted, dict) and "structural_tag" in wanted) or "structural_tag" in sampling:
            raise NotJudgedError("its schemas stand in structural tags")
        schema = sampling.get("guided_json") if wanted is None else wanted.get("json")
        try:
            return orjson.loads(schema) if isinstance(schema, str) else schema
        except orjson.JSONDecodeError:
            raise NotJudgedError("the schema cannot be read") from None

    def _own(self, place: str) -> str:
        """A place in the sampling parameters, as one in the client's fields."""
        param, _, path = place.partition("#")
        if param == STRUCTURED_OUTPUTS and self._plan is not None and self._plan.has_grammar:
            return self._plan.own_place(path) or self._in_schema_field(path.partition("/json_schema")[2]) or place
        if param == STRUCTURED_OUTPUTS and path.startswith("/json/"):
            return self._in_schema_field(path.removeprefix("/json")) or place
        return place

    def _in_schema_field(self, path: str) -> str:
        field = self._request.schema_field
        return f"{field}#{path}" if field and self._request.structure_field != STRUCTURED_OUTPUTS else ""
