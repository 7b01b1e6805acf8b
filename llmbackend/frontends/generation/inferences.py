"""A request's inferences: its generation, one inference per prompt, or the description of a prompt.

Invariants: a Generation is used only on the event loop, and closed however its request ends; responses of its
inferences are merged in order of arrival and share one backlog, which bounds the bytes that wait for the client. A
described prompt is the one that a generation of the same request has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

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
    RETURN_TIMES,
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
_PROMPTS_AT_ONCE: Final = 128
MANY_TOKENS: Final = 512
"""Tokens, with those in logprobs, that are parsed or rendered in about 2 ms."""


class Generation:
    """The choices of one request."""

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
        """request_id: the answer's id. trace: the first prompt's; others get child traces. recording: of a copied
        stream"""
        self._request = request
        self._plan = plan
        self._request_id = request_id
        self._schemas = SchemaReport(request, plan) if _has_structure(request, plan) else None
        self._gate = gate
        self._arrived: deque[Inference] = deque()
        """The inference of each waiting response."""
        self._index_of: dict[Inference, int] = {}
        self._listener: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._open = len(request.prompts)
        self.num_logprobs = 0
        """Of all deltas so far; the end of some answers repeats them."""
        self._recording = recording
        options = _options(request, target, plan)
        parameters: dict[str, ParameterValue] = {MAX_TOKENS_MUST_FIT: True} if request.max_tokens_field else {}
        backlog = gate.new_backlog(0 if recording is None else recording.num_known)
        gate.admit(request.num_generations)
        count = request.num_generations // len(request.prompts)

        def submissions() -> Iterator[None]:
            for index, prompt in enumerate(request.prompts):
                part = trace.child() if trace is not None and index else trace
                message = InferenceRequest(
                    model_name=target.name,
                    id=request_id,
                    trace=part,
                    inputs=(target.model.reshaped(prompt), *options),
                    parameters=parameters,
                    resume=None if recording is None else recording.resume(index),
                )
                self._index_of[gate.submit(message, backlog, self._on_responses, count)] = index
                yield

        self._submissions = submissions()
        try:
            self._submit_some()
        except BaseException:
            self.close()
            raise

    def _submit_some(self) -> None:
        for _ in islice(self._submissions, _PROMPTS_AT_ONCE):
            pass

    async def submit_all(self) -> None:
        """Submits the prompts that the constructor left, so that the event loop is never kept for long. Raises as the
        constructor does."""
        try:
            while len(self._index_of) < len(self._request.prompts):
                await asyncio.sleep(0)
                self._submit_some()
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended and all deltas were popped."""
        return self._open == 0 and not self._arrived

    def listen(self, listener: Callable[[], None] | None) -> None:
        """listener: called on the event loop once per wake-up, to pop all deltas; the caller pops those that are
        already waiting. None: back to `wait`"""
        self._listener = listener

    def _on_responses(self, inferences: Sequence[Inference]) -> None:
        self._arrived.extend(inferences)
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None:
            settle(self._waiter)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for a delta; returns False after `timeout_s`."""
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
        """The next delta, None if there is none yet. Raises OpenAIError if its inference failed."""
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
            raise in_client_fields(OpenAIError.of(error), self._request, self._plan) from None
        if delta.logprobs:
            self.num_logprobs += sum(map(len, delta.logprobs))
        if delta.is_final:
            self._open -= 1
        choice = self._index_of[inference] * self._request.n + delta.sequence_index
        if self._schemas is not None:
            self._schemas.add(choice, delta)
        return choice, delta

    def _pop_recorded(self, recording: Recording) -> tuple[Inference, Item] | None:
        """The next response in the order of the record, which is extended; None if it has not arrived."""
        inference = next((one for one in self._arrived if recording.takes(self._index_of[one])), None)
        if inference is None:
            return None
        self._arrived.remove(inference)
        item = inference.pop()
        if item[0] is not None:
            recording.delta(self._index_of[inference], item[0].delta)
        return inference, item

    async def next(self) -> Arrival:
        """Like `pop`, but waits for a delta."""
        while (arrival := self.pop()) is None:
            await self.wait()
        return arrival

    def headers(self) -> dict[str, str]:
        """Headers about the request's schemas, available once the first response has arrived."""
        return {} if self._schemas is None else self._schemas.headers()

    async def checked(self) -> dict[str, str]:
        """Headers for the end of the answer: also whether it satisfies the schemas, which is logged too."""
        if self._schemas is None or not self._schemas.is_needed:
            return {}
        return await self._gate.run_in_thread(partial(self._schemas.judge, self._request_id))

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await self._gate.run_in_thread(work)

    async def in_thread_if_long(self, num_tokens: int, work: Callable[[], T]) -> T:
        """`work()`, which reads or writes so many tokens; in a thread if there are many."""
        return work() if num_tokens <= MANY_TOKENS else await self.in_thread(work)

    def close(self) -> None:
        """Cancels running inferences. Idempotent."""
        for inference in self._index_of:
            inference.close()


def check_fields(request: GenerationRequest, target: Target) -> None:
    """Raises OpenAIError for a field for which the model has no input."""
    if (field := _unsupported_field(request, target)) is not None:
        message = f"the model '{target.name}' has no input for '{field}'"
        param = "model" if field == "lora_name" else field
        raise request.in_client_fields(OpenAIError(message, param=param, code="unsupported_parameter"))


def _unsupported_field(request: GenerationRequest, target: Target) -> str | None:
    if not target.model.has_input(SAMPLING_PARAMETERS) and (fields := (*request.sent_fields, *_lora(target))):
        return fields[0]
    if request.logprobs is not None and not target.model.has_input(RETURN_LOGPROBS):
        return "logprobs"
    if request.prior_output_ids and not target.model.has_input(PRIOR_OUTPUT_IDS):
        return PRIOR_OUTPUT_IDS
    return next((field for name, field in _flags(request).items() if not target.model.has_input(name)), None)


def _flags(request: GenerationRequest) -> dict[str, str]:
    """Model inputs that request additional outputs → the client's fields."""
    flags = request.prompt_form.inputs
    if request.return_token_ids:
        flags[RETURN_OUTPUT_IDS] = "return_token_ids"
    if request.num_generations > len(request.prompts):
        flags[RETURN_SEQUENCE_INDEX] = "n" if request.n > 1 else "best_of"
    return flags


def _has_structure(request: GenerationRequest, plan: AnswerPlan) -> bool:
    """Whether the answer is constrained."""
    return not STRUCTURE_FIELDS.isdisjoint(request.sampling) or plan.has_grammar


def _lora(target: Target) -> dict[str, str]:
    return {"lora_name": target.lora_name} if target.lora_name else {}


def sampling_of(request: GenerationRequest, target: Target, plan: AnswerPlan) -> dict[str, Any]:
    return request.sampling | _lora(target) | plan.sampling


def in_client_fields(error: OpenAIError, request: GenerationRequest, plan: AnswerPlan) -> OpenAIError:
    """A model error in terms of the client's fields."""
    return plan.in_client_fields(error) if plan.is_about_calls(error) else request.in_client_fields(error)


def _options(request: GenerationRequest, target: Target, plan: AnswerPlan) -> list[Tensor]:
    """The inputs other than the prompt."""
    wants_counts, wants_usage = _counts(request)
    has_usage = wants_usage and target.model.has_input(RETURN_USAGE)
    sampling = sampling_of(request, target, plan)
    has_stops = request.sampling.get("stop") or request.sampling.get("stop_token_ids")
    options = option_inputs(
        sampling,
        text_tokens=plan.reads_tokens,
        stream=request.stream is not None,
        logprobs=request.logprobs is not None,
        counts=wants_counts or (wants_usage and not has_usage),
        more=(
            *_flags(request),
            *((RETURN_STOP_REASON,) if has_stops else ()),
            *((RETURN_USAGE,) if has_usage else ()),
            *((RETURN_TIMES,) if request.include_metrics else ()),
            *((RETURN_NOT_ENFORCED,) if _has_structure(request, plan) else ()),
        ),
    )
    check_grammar_size(len(options[0].data.item(0)), sampling, request, plan)
    if request.prior_output_ids:
        options = (*options, prior_output_ids_tensor(request.prior_output_ids))
    return [target.model.reshaped(tensor) for tensor in options if target.model.has_input(tensor.name)]


def _counts(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether token counts are needed with each response, and at the end."""
    if request.stream is None:
        # RETURN_USAGE has the cached tokens of its own choice, but only the first one's do not come from the others.
        is_ranked = request.num_generations > request.num_choices
        return is_ranked, not is_ranked
    has_end = request.stored is not None or request.include_metrics
    is_requested = bool(request.stream.include_usage)
    has_each = request.stream.interval_tokens > 1 or (is_requested and bool(request.stream.continuous_usage_stats))
    return has_each, (is_requested or has_end) and not has_each


def _no_tokens() -> npt.NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PromptDescription:
    """Fields that were not requested are empty."""

    num_tokens: int = 0
    max_model_len_tokens: int = 0
    token_ids: npt.NDArray[np.int32] = field(default_factory=_no_tokens)
    token_names: bytes = b"[]"
    """The tokens' names in the vocabulary, as a JSON list."""
    text: str = ""
    tokenizer_config: bytes = b"{}"
    """JSON object."""
    sampling_parameters: bytes = b"{}"
    """The sampling parameters that a generation would have, as a JSON object."""


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
    """wanted: flags of tensors.py: RETURN_NUM_INPUT_TOKENS, RETURN_MAX_MODEL_LEN, RETURN_PROMPT_TOKEN_IDS,
    RETURN_PROMPT_TOKENS, RETURN_PROMPT_TEXT, RETURN_TOKENIZER_CONFIG, and RETURN_SAMPLING_PARAMETERS, with which the
    request is checked like a generation. sampling: with that flag all parameters, otherwise those that change the
    prompt. The caller must handle a client disconnect (`unless_disconnected`). Raises OpenAIError in the host's
    names."""
    if not target.model.has_input(PROMPT_ONLY):
        message = f"the model '{target.name}' has no input '{PROMPT_ONLY}', so its prompts are unknown"
        raise OpenAIError(message, param="model", code="unsupported_parameter")
    flags = (Tensor.of(name, np.array([True])) for name in (PROMPT_ONLY, *wanted))
    parameters = Tensor.text(SAMPLING_PARAMETERS, orjson.dumps(dict(sampling or {})))
    inputs = tuple(target.model.reshaped(tensor) for tensor in (prompt, parameters, *flags))
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
        tokenizer_config=_single(found, "tokenizer_config", b"{}"),
        sampling_parameters=_single(found, "sampling_parameters", b"{}"),
    )


def _single(found: Mapping[str, Any], name: str, default: Any) -> Any:
    return found[name].item(0) if name in found else default
