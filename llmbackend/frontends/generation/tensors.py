"""The LLM tensor interface (vllm_backend's, plus `messages` and `input_ids`); tensor names occur only here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import internal
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.outputs import Outputs
from llmbackend.core.tensors import JsonTensor, Tensor

MESSAGES = "messages"
TEXT_INPUT = "text_input"
INPUT_IDS = "input_ids"
TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
TEXT_TOKENS = "text_tokens"
SAMPLING_PARAMETERS = "sampling_parameters"
PRIOR_OUTPUT_IDS = "prior_output_ids"
RETURN_LOGPROBS = "return_logprobs"
RETURN_TEXT_TOKENS = "return_text_tokens"
RETURN_OUTPUT_IDS = "return_output_ids"
RETURN_STOP_REASON = "return_stop_reason"
RETURN_SEQUENCE_INDEX = "return_sequence_index"
RETURN_PROMPT_TOKEN_IDS = "return_prompt_token_ids"
RETURN_PROMPT_FIRST_TOKEN = "return_prompt_first_token"
RETURN_PROMPT_TEXT = "return_prompt_text"
RETURN_PROMPT_TOKENS = "return_prompt_tokens"
RETURN_SAMPLING_PARAMETERS = "return_sampling_parameters"
RETURN_MAX_MODEL_LEN = "return_max_model_len"
RETURN_TOKENIZER_CONFIG = "return_tokenizer_config"
RETURN_NUM_INPUT_TOKENS = "return_num_input_tokens"
PROMPT_ONLY = "prompt_only"
RETURN_USAGE = "return_usage"
RETURN_NOT_ENFORCED = "return_not_enforced"
RETURN_TIMES = "return_times"
PROMPT_LOGPROBS = "prompt_logprobs"
PROMPT_INPUTS: Final[Mapping[str, str]] = {MESSAGES: "BYTES", TEXT_INPUT: "BYTES", INPUT_IDS: "INT32"}
"""The inputs that can be a prompt, with their datatypes; a request has one of them."""
OPTION_INPUTS: Final[Mapping[str, str]] = {
    SAMPLING_PARAMETERS: "BYTES",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    RETURN_LOGPROBS: "BOOL",
    RETURN_NUM_INPUT_TOKENS: "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_num_cached_tokens": "BOOL",
    RETURN_TEXT_TOKENS: "BOOL",
    RETURN_OUTPUT_IDS: "BOOL",
    RETURN_STOP_REASON: "BOOL",
    RETURN_SEQUENCE_INDEX: "BOOL",
    RETURN_PROMPT_TOKEN_IDS: "BOOL",
    RETURN_PROMPT_FIRST_TOKEN: "BOOL",
    RETURN_PROMPT_TEXT: "BOOL",
    RETURN_PROMPT_TOKENS: "BOOL",
    RETURN_MAX_MODEL_LEN: "BOOL",
    RETURN_TOKENIZER_CONFIG: "BOOL",
    RETURN_SAMPLING_PARAMETERS: "BOOL",
    PROMPT_ONLY: "BOOL",
    PRIOR_OUTPUT_IDS: "INT32",
    RETURN_USAGE: "BOOL",
    RETURN_NOT_ENFORCED: "BOOL",
    RETURN_TIMES: "BOOL",
}
"""The other inputs, with their datatypes."""
MAX_TOKENS_MUST_FIT: Final = "triton_max_tokens_must_fit"
"""Request parameter: a max_tokens beyond the context is refused instead of reduced."""
_NONE = ResponseFlag.NONE
TokenEntries = dict[str, dict[str, Any]]
"""{token id: {logprob, rank, decoded_token}} at one position; the first entry is the chosen token's (as in vLLM)."""
TextToken = tuple[int, str, bool]
"""(token id, the text that it added to the output, whether it is a special token with its own text). Negative id: text
of earlier tokens that was held back."""
PROMPT_IN_REASONING = -2
"""Id of the first TextToken if the prompt already ends inside the reasoning."""


class PromptDetails(msgspec.Struct, frozen=True):
    """Details of a prompt, which the model sends once, with the first response of the prompt's first choice."""

    text: str = ""
    token_ids: Sequence[int] = ()
    first_token: str = ""
    """The prompt's first token as text."""
    logprobs: Sequence[TokenEntries | None] = ()
    """One entry per token; the first token has none."""
    logprobs_json: bytes = b""
    """The same as `logprobs`, as JSON."""


class Delta(msgspec.Struct, frozen=True):
    """What one response adds to one choice."""

    text: str
    """New text, always whole characters."""
    finish_reason: str | None
    """`stop` or `length`, on the last response."""
    logprobs: list[TokenEntries]
    """One entry per new token, if requested."""
    num_input_tokens: int
    """Tokens of the whole prompt."""
    num_output_tokens: int
    """New output tokens."""
    is_final: bool
    """Nothing follows."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed again; None if the model does not report them."""
    text_tokens: Sequence[TextToken] = ()
    """The new tokens with their text, if requested."""
    sequence_index: int = 0
    """The index of the choice among those of its prompt."""
    token_ids: Sequence[int] = ()
    """The new tokens, if requested."""
    prompt: PromptDetails | None = None
    """Set if requested."""
    stop_reason: int | str | None = None
    """In the last response, if requested: the stop string or stop token of the request that ended the choice."""
    usage: tuple[int, int, int] | None = None
    """(prompt tokens, output tokens, prompt tokens that were not computed again) of the choice so far. Present in its
    first and its last response, if responses have no counts of their own."""
    not_enforced: Sequence[str] = ()
    """Locations in the sampling parameters of unenforced schema keywords; with a choice's first response, on
    request."""
    times_ns: tuple[int, int, int, int] | None = None
    """When the request arrived, an engine took it, and its first and last tokens came; with the last response, on
    request."""

    @property
    def num_listed_tokens(self) -> int:
        """Tokens of the answer and the prompt that it lists. Reading it takes time for each."""
        return len(self.text_tokens) + (0 if self.prompt is None else len(self.prompt.token_ids))


def text_tensor(text: str) -> Tensor:
    return Tensor.text(TEXT_INPUT, text)


def input_ids_tensor(token_ids: Sequence[int]) -> Tensor:
    return Tensor.of(INPUT_IDS, np.array(token_ids, dtype=np.int32))


def prior_output_ids_tensor(token_ids: Sequence[int]) -> Tensor:
    return Tensor.of(PRIOR_OUTPUT_IDS, np.array(token_ids, dtype=np.int32))


def messages_tensor(messages: Sequence[dict[str, Any]], template_options: dict[str, Any]) -> Tensor:
    """A list of messages, or an object of messages and options of the chat template if there are any."""
    value = {"messages": messages, **template_options} if template_options else messages
    return JsonTensor.of_value(MESSAGES, value, orjson.dumps(value))


def option_inputs(
    sampling: dict[str, Any],
    *,
    stream: bool,
    logprobs: bool,
    counts: bool,
    text_tokens: bool = False,
    more: Collection[str] = (),
) -> tuple[Tensor, ...]:
    """The inputs other than the prompt: how tokens are chosen, and what the responses carry. counts: with each
    response; more: names of other flags that are set"""
    flags = {
        "stream": stream,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        RETURN_LOGPROBS: logprobs,
        RETURN_NUM_INPUT_TOKENS: counts,
        "return_num_output_tokens": counts,
        "return_num_cached_tokens": counts,
    }
    if text_tokens:
        flags[RETURN_TEXT_TOKENS] = True
    flags |= dict.fromkeys(more, True)
    parameters = JsonTensor.of_value(SAMPLING_PARAMETERS, sampling, orjson.dumps(sampling))
    return (parameters, *(Tensor.of(name, np.array([value], dtype=np.bool_)) for name, value in flags.items()))


def read_delta(response: InferenceResponse | None, flags: ResponseFlag) -> Delta:
    """Raises the response's own error, and TritonError INTERNAL for outputs that do not belong to the interface."""
    final = flags is not _NONE and is_final(flags)
    if response is None:
        return Delta("", None, [], 0, 0, final)
    if response.error is not None:
        raise response.error
    outputs = response.outputs
    if type(outputs) is Outputs and outputs.layout.names == _ONLY_TEXT:
        # The only outputs of most streams: avoids all other lookups for each of their tokens.
        text, reason = outputs.values
        return Delta(text, _REASONS.get(reason, reason), [], 0, 0, final)
    values = outputs.named() if isinstance(outputs, Outputs) else _named_values(response)
    if TEXT_OUTPUT not in values:
        if values or not final:
            raise internal(f"model '{response.model_name}' sent a response without '{TEXT_OUTPUT}'")
        return Delta("", None, [], 0, 0, final)
    return _delta(values, final)


_ONLY_TEXT = (TEXT_OUTPUT, FINISH_REASON)
_REASONS = {"": None, "None": None, "null": None}
"""Texts that mean no reason."""
_JSON_OUTPUTS = frozenset((TEXT_TOKENS, "logprobs", "stop_reason", "not_enforced"))
_TEXT_OUTPUTS = frozenset((TEXT_OUTPUT, FINISH_REASON, "prompt_text", "prompt_first_token"))


def _named_values(response: InferenceResponse) -> dict[str, Any]:
    values = {}
    for tensor in response.outputs:
        try:
            values[tensor.name] = _value(tensor)
        except (ValueError, IndexError) as error:  # not UTF-8, not JSON, or empty
            raise internal(f"model '{response.model_name}' sent an invalid '{tensor.name}': {error}") from None
    return values


def _value(tensor: Tensor) -> Any:
    """A text, the value of a JSON text, or numbers."""
    name, data = tensor.name, tensor.data
    if name in _TEXT_OUTPUTS:
        item = data.item(0)
        return item.decode() if isinstance(item, bytes) else str(item)
    if name in _JSON_OUTPUTS:
        return _json_value(tensor)
    return tensor if name == PROMPT_LOGPROBS else data.tolist()  # its text is sent unchanged


def _delta(values: Mapping[str, Any], is_final: bool) -> Delta:
    get = values.get
    reason: str = get(FINISH_REASON, "")
    return Delta(
        text=values[TEXT_OUTPUT],
        finish_reason=_REASONS.get(reason, reason),
        logprobs=get("logprobs") or [],
        num_input_tokens=_count(get("num_input_tokens")),
        num_output_tokens=_count(get("num_output_tokens")),
        is_final=is_final,
        num_cached_tokens=_count(values["num_cached_tokens"]) if "num_cached_tokens" in values else None,
        text_tokens=get(TEXT_TOKENS, ()),
        sequence_index=_count(get("sequence_index")),
        token_ids=get("output_ids", ()),
        stop_reason=get("stop_reason"),
        usage=tuple(values["usage"]) if "usage" in values else None,
        not_enforced=get("not_enforced", ()),
        times_ns=tuple(values["times"]) if "times" in values else None,
        prompt=None if values.keys().isdisjoint(_PROMPT_OUTPUTS) else _prompt_details(values),
    )


_PROMPT_OUTPUTS = frozenset(("prompt_text", "prompt_first_token", "prompt_token_ids", PROMPT_LOGPROBS))


def _prompt_details(values: Mapping[str, Any]) -> PromptDetails:
    logprobs: Tensor | None = values.get(PROMPT_LOGPROBS)
    return PromptDetails(
        text=values.get("prompt_text", ""),
        token_ids=values.get("prompt_token_ids", ()),
        first_token=values.get("prompt_first_token", ""),
        logprobs=() if logprobs is None else _json_value(logprobs),
        logprobs_json=b"" if logprobs is None else logprobs.data.item(0),
    )


def _json_value(tensor: Tensor) -> Any:
    return tensor.value if isinstance(tensor, JsonTensor) else orjson.loads(tensor.data.item(0))


def _count(numbers: Any) -> int:
    """The first of an array's numbers, 0 if there are none."""
    while isinstance(numbers, list):
        numbers = numbers[0]
    return int(numbers or 0)
