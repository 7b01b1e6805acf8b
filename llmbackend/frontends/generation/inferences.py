"""What a request asks of the host: its generation, one inference per prompt, or a description of a prompt.

For: endpoints and writers. Does not know: JSON or HTTP. Invariants: `close` is called however a request ends, which
cancels the inferences that are not over. A Generation is used only on the event loop; responses reach it through the
mailbox, which wakes the loop once per engine step, and are merged in order of arrival. The inferences share one
backlog, so that what waits for their one client is bounded together. A prompt is described as a generation of the same
request would have it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from llmbackend.core.errors import TritonError
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ParameterValue
from llmbackend.core.tensors import Tensor
from llmbackend.core.tracing.trace import RequestTrace

from ..http.errors import OpenAIError
from ..inference import Inference, Item
from ..inference_gate import InferenceGate
from ..journals.journal import Recording, settle
from .models import Target
from .plan import AnswerPlan, check_grammar_size
from .request import STRUCTURE_FIELDS, GenerationRequest
from .schema_report import SchemaReport
from .tensors import (
    MAX_TOKENS_MUST_FIT,
    PRIOR_OUTPUT_IDS,
    PROMPT_ONLY,
    RETURN_LOGPROBS,
    RETURN_NOT_ENFORCED,
    RETURN_OUTPUT_IDS,
    RETURN_SEQUENCE_INDEX,
    RETURN_STOP_REASON,
    RETURN_USAGE,
    SAMPLING_PARAMETERS,
    Delta,
    option_inputs,
    prior_output_ids_tensor,
    read_delta,
)

T = TypeVar("T")
Arrival = tuple[int, Delta]
"""(index of the choice, its new tokens)"""


class Generation:
    """The choices of one request. `request_id` is the response's id; its inferences carry it too."""

    def __init__(
        self,
        gate: InferenceGate,
        request: GenerationRequest,
        target: Target,
        request_id: str,
        *,
        plan: AnswerPlan,
        trace: RequestTrace | None = None,
        recording: Recording | None = None,
    ) -> None:
        """plan: how the answer is read. In `trace`, further prompts are children of the first.
        recording: of the stream that is made of it."""
        self._request = request
        self._plan = plan
        self._request_id = request_id
        self._schemas = SchemaReport(request, plan) if _has_structure(request, plan) else None
        self._gate = gate
        self._arrived: deque[Inference] = deque()
        """The inference of each response that waits."""
        self._index_of: dict[Inference, int] = {}
        self._listener: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._open = len(request.prompts)
        self._recording = recording
        options = _options(request, target, plan)
        parameters: dict[str, ParameterValue] = {MAX_TOKENS_MUST_FIT: True} if request.max_tokens_field else {}
        backlog = gate.new_backlog(0 if recording is None else recording.num_known)
        gate.admit(request.num_generations)
        count = request.num_generations // len(request.prompts)
        try:
            for index in range(len(request.prompts)):
                part = trace.child() if trace is not None and index else trace
                message = InferenceRequest(
                    model_name=target.name,
                    id=request_id,
                    trace=part,
                    inputs=(target.model.fitted(request.prompts[index]), *options),
                    parameters=parameters,
                    resume=None if recording is None else recording.resume(index),
                )
                self._index_of[gate.submit(message, backlog, self._on_responses, count)] = index
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Every choice has ended and all its deltas were taken."""
        return self._open == 0 and not self._arrived

    def listen(self, listener: Callable[[], None] | None) -> None:
        """From now on `listener` is called on the event loop, once for all deltas of a wake-up, and pops them all. The
        caller pops those that wait already. None: `wait` again."""
        self._listener = listener

    def _on_responses(self, inferences: Sequence[Inference]) -> None:
        self._arrived.extend(inferences)
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None:
            settle(self._waiter)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until a delta is here; False when `timeout_s` passed without one."""
        if self._arrived:
            return True
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        # `call_later` costs a fifth of asyncio.timeout, and this is awaited once per token.
        alarm = None if timeout_s is None else loop.call_later(timeout_s, settle, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if alarm is not None:
                alarm.cancel()
        return bool(self._arrived)

    def pop(self) -> Arrival | None:
        """The next delta, None when none is here. Raises OpenAIError when the inference it belongs to failed."""
        if not self._arrived:
            return None
        if self._recording is None:
            inference = self._arrived.popleft()
            item = inference.pop()
        else:
            recorded = self._pop_recorded(self._recording)
            if recorded is None:
                return None
            inference, item = recorded
        try:
            delta = read_delta(*item)
        except TritonError as error:
            raise in_own_fields(OpenAIError.of(error), self._request, self._plan) from None
        if delta.is_final:
            self._open -= 1
        choice = self._index_of[inference] * self._request.n + delta.sequence_index
        if self._schemas is not None:
            self._schemas.add(choice, delta)
        return choice, delta

    def _pop_recorded(self, recording: Recording) -> tuple[Inference, Item] | None:
        """The next response in the order of the record, noted in it; None while it is not here."""
        inference = next((one for one in self._arrived if recording.takes(self._index_of[one])), None)
        if inference is None:
            return None
        self._arrived.remove(inference)
        item = inference.pop()
        if item[0] is not None:
            recording.delta(self._index_of[inference], item[0].delta)
        return inference, item

    async def next(self) -> Arrival:
        """The next delta, as `pop`."""
        while (arrival := self.pop()) is None:
            await self.wait()
        return arrival

    def headers(self) -> dict[str, str]:
        """What the answer's first response says of the request's schemas."""
        return {} if self._schemas is None else self._schemas.headers()

    async def checked(self) -> dict[str, str]:
        """The same with whether the answer, whose last delta was popped, satisfies them; which is logged."""
        if self._schemas is None or not self._schemas.is_needed:
            return {}
        return await self._gate.run_in_thread(partial(self._schemas.judge, self._request_id))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """`work()`, apart from the event loop."""
        return await self._gate.run_in_thread(work)

    def close(self) -> None:
        """Cancels what is not over. Idempotent."""
        for inference in self._index_of:
            inference.close()


def check_fields_taken(request: GenerationRequest, target: Target) -> None:
    """Raises OpenAIError for a field that the model has no input for: no field of a request is dropped silently."""
    if (field := _field_not_taken(request, target)) is not None:
        raise request.in_own_fields(_not_taken(target, field))


def _field_not_taken(request: GenerationRequest, target: Target) -> str | None:
    if not target.model.takes(SAMPLING_PARAMETERS) and (fields := (*request.sent_fields, *_lora(target))):
        return fields[0]
    if request.logprobs is not None and not target.model.takes(RETURN_LOGPROBS):
        return "logprobs"
    if request.prior_output_ids and not target.model.takes(PRIOR_OUTPUT_IDS):
        return PRIOR_OUTPUT_IDS
    return next((field for name, field in _flags(request).items() if not target.model.takes(name)), None)


def _flags(request: GenerationRequest) -> dict[str, str]:
    """Inputs of the model by which a request asks for more outputs, each with its field."""
    flags = request.prompt_form.inputs
    if request.return_token_ids:
        flags[RETURN_OUTPUT_IDS] = "return_token_ids"
    if request.num_generations > len(request.prompts):
        flags[RETURN_SEQUENCE_INDEX] = "n" if request.n > 1 else "best_of"
    return flags


_STOP_REASON = (RETURN_STOP_REASON,)


def _can_stop(request: GenerationRequest) -> bool:
    """Whether something of the request's own can end its answer: then the answer says what did."""
    return bool(request.sampling.get("stop") or request.sampling.get("stop_token_ids"))


def _has_structure(request: GenerationRequest, plan: AnswerPlan) -> bool:
    """Whether the answer is held to a form."""
    return not STRUCTURE_FIELDS.isdisjoint(request.sampling) or plan.has_grammar


def _not_taken(target: Target, field: str) -> OpenAIError:
    message = f"the model '{target.name}' has no input for '{field}'"
    return OpenAIError(message, param="model" if field == "lora_name" else field, code="unsupported_parameter")


def _lora(target: Target) -> dict[str, str]:
    return {"lora_name": target.lora_name} if target.lora_name else {}


def sampling_of(request: GenerationRequest, target: Target, plan: AnswerPlan) -> dict[str, Any]:
    """The sampling parameters that the model gets."""
    return request.sampling | _lora(target) | plan.sampling


def in_own_fields(error: OpenAIError, request: GenerationRequest, plan: AnswerPlan) -> OpenAIError:
    """An error of the model with the request's names of fields."""
    return plan.in_own_fields(error) if plan.is_about_calls(error) else request.in_own_fields(error)


def _options(request: GenerationRequest, target: Target, plan: AnswerPlan) -> list[Tensor]:
    """The inputs other than the prompt, which all prompts share."""
    wants_counts, wants_usage = _counts(request)
    has_usage = wants_usage and target.model.takes(RETURN_USAGE)
    sampling = sampling_of(request, target, plan)
    options = option_inputs(
        sampling,
        text_tokens=plan.reads_tokens,
        stream=request.stream is not None,
        logprobs=request.logprobs is not None,
        counts=wants_counts or (wants_usage and not has_usage),
        more=(
            *_flags(request),
            *(_STOP_REASON if _can_stop(request) else ()),
            *((RETURN_USAGE,) if has_usage else ()),
            *((RETURN_NOT_ENFORCED,) if _has_structure(request, plan) else ()),
        ),
    )
    check_grammar_size(len(options[0].data.item(0)), sampling, request, plan)
    if request.prior_output_ids:
        options = (*options, prior_output_ids_tensor(request.prior_output_ids))
    return [target.model.fitted(tensor) for tensor in options if target.model.takes(tensor.name)]


def _counts(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether the counts of tokens are needed with each response; whether they are needed at the end."""
    if request.stream is None:
        return False, True
    is_asked = bool(request.stream.include_usage)
    has_each = request.stream.interval_tokens > 1 or (is_asked and bool(request.stream.continuous_usage_stats))
    return has_each, (is_asked or request.stored is not None) and not has_each


def _no_tokens() -> npt.NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PromptDescription:
    """What was asked for; the rest is empty."""

    num_tokens: int = 0
    max_model_len_tokens: int = 0
    token_ids: npt.NDArray[np.int32] = field(default_factory=_no_tokens)
    token_names: bytes = b"[]"
    """Of the vocabulary, as a JSON list."""
    text: str = ""
    sampling_parameters: bytes = b"{}"
    """As they would hold for a generation, as a JSON object."""


async def describe_prompt(
    gate: InferenceGate,
    target: Target,
    prompt: Tensor,
    wanted: Collection[str],
    *,
    sampling: Mapping[str, Any] | None = None,
    request_id: str = "",
    max_tokens_must_fit: bool = False,
) -> PromptDescription:
    """wanted: of the flags in tensors.py: RETURN_NUM_INPUT_TOKENS, RETURN_MAX_MODEL_LEN, RETURN_PROMPT_TOKEN_IDS,
    RETURN_PROMPT_TOKENS, RETURN_PROMPT_TEXT, and RETURN_SAMPLING_PARAMETERS, with which the request is checked as a
    generation would be. sampling: the parameters; without that flag, those that change the prompt. A client that goes
    away is the caller's to notice (`unless_disconnected`).

    Raises OpenAIError, with the host's names of inputs.
    """
    if not target.model.takes(PROMPT_ONLY):
        message = f"the model '{target.name}' has no input '{PROMPT_ONLY}', so its prompts are unknown"
        raise OpenAIError(message, param="model", code="unsupported_parameter")
    flags = (Tensor.of(name, np.array([True])) for name in (PROMPT_ONLY, *wanted))
    parameters = Tensor.text(SAMPLING_PARAMETERS, orjson.dumps(dict(sampling or {})))
    inputs = tuple(target.model.fitted(tensor) for tensor in (prompt, parameters, *flags))
    gate.admit(1)
    marks: dict[str, ParameterValue] = {MAX_TOKENS_MUST_FIT: True} if max_tokens_must_fit else {}
    request = InferenceRequest(model_name=target.name, id=request_id, inputs=inputs, parameters=marks)
    inference = gate.submit(request)
    try:
        (response,) = await inference.collect(1)
    finally:
        inference.close()
    if response.error is not None:
        raise OpenAIError.of(response.error)
    return _read(response)


def _read(response: InferenceResponse) -> PromptDescription:
    found: dict[str, Any] = {tensor.name: tensor.data for tensor in response.outputs}
    return PromptDescription(
        num_tokens=_single(found, "num_input_tokens", 0),
        max_model_len_tokens=_single(found, "max_model_len", 0),
        token_ids=found["prompt_token_ids"].ravel() if "prompt_token_ids" in found else _no_tokens(),
        token_names=_single(found, "prompt_tokens", b"[]"),
        text=_single(found, "prompt_text", b"").decode(),
        sampling_parameters=_single(found, "sampling_parameters", b"{}"),
    )


def _single(found: Mapping[str, Any], name: str, default: Any) -> Any:
    return found[name].item(0) if name in found else default
