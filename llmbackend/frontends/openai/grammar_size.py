"""How large the grammar of an answer may be, told in the fields of the request that it comes from.

For: generations. Does not know: tensors, what a grammar says. Invariant: a grammar that is too large for the model's
input of sampling parameters is refused with the name of the schema that makes it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import orjson

from ..conversation.tools import Function
from .answer_plan import AnswerPlan
from .errors import JsonObject, OpenAIError
from .requests import GenerationRequest
from .response_format import STRUCTURED_OUTPUTS

MAX_SAMPLING_JSON_BYTES: Final = 256 << 10
"""Of all sampling parameters together: the `llm` backend's bound."""


def check_grammar_size(
    num_bytes: int, sampling: JsonObject, request: GenerationRequest, plan: AnswerPlan | None
) -> None:
    """num_bytes: of `sampling` as JSON. Raises OpenAIError where a schema or a grammar has most of too many; what else
    may be too large, the model names."""
    if num_bytes <= MAX_SAMPLING_JSON_BYTES or STRUCTURED_OUTPUTS not in sampling:
        return
    of_grammar = len(orjson.dumps(sampling[STRUCTURED_OUTPUTS]))
    if 2 * of_grammar < num_bytes:
        return
    size, field, of_all = max(_parts(request, plan), default=(of_grammar, request.structure_field, "has"))
    raise OpenAIError(
        f"'{field}' has {size} bytes, and {of_all} {of_grammar} bytes of JSON as a grammar, expected at most "
        f"{MAX_SAMPLING_JSON_BYTES} for all sampling parameters together",
        param=field,
    )


def _parts(request: GenerationRequest, plan: AnswerPlan | None) -> Iterator[tuple[int, str, str]]:
    """Bytes, field, and how all of its kind are called."""
    if (wanted := request.sampling.get(STRUCTURED_OUTPUTS)) is not None:
        yield len(orjson.dumps(wanted)), request.structure_field, "has"
    if plan is not None and plan.tool_use is not None and STRUCTURED_OUTPUTS in plan.sampling:
        for function in plan.tool_use.functions:
            yield _size(function), function.param, "all tools have"


def _size(function: Function) -> int:
    grammar = function.input_grammar
    return len(orjson.dumps(function.parameters)) if grammar is None else len(grammar.definition.encode())
