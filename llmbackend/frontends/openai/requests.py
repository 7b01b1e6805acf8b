"""From the body of an HTTP request to one frozen message: read, parsed as JSON, validated, put into tensors.

For: the router. Does not know: the host, how responses are written. Invariant: a request that exists is valid as far
as it can be judged without the model, and holds everything that its body asked for. The parser of a further endpoint
makes the same GenerationRequest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request

from llmbackend.core.errors import TritonError, shown
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.errors import BodyTooLargeError
from llmbackend.frontends.http.json_reader import check_depth, check_objects
from llmbackend.frontends.http.request_body import ENCODINGS, IDENTITY, content_encoding
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.protocol_options import RequestDefaults

from ..conversation.tools import ToolUse
from .errors import CONTEXT_LENGTH_EXCEEDED, JsonObject, OpenAIError, refuse
from .logprobs import LogprobForm
from .messages import for_template
from .prompt_details import NO_PROMPT_FORM, PromptForm
from .reasoning import NO_REASONING_USE, ReasoningUse
from .response_format import STRUCTURED_OUTPUTS, in_structure_field
from .schema import (
    MAX_CHOICES,
    TEMPLATE_NAMES,
    ChatCompletionRequest,
    ChatPromptFields,
    CompletionRequest,
    StreamOptions,
)
from .tensors import INPUT_IDS, MESSAGES, input_ids_tensor, messages_tensor, text_tensor
from .validation import read

_MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
"""The first of them that a request has is its limit."""
_TEMPLATE_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
_NO_OPTIONS = StreamOptions.model_construct()
_OBJECT_BYTES = 128
"""Reading an object, such as a short message, takes about 8 µs: 2,048 of them are read on the event loop at most."""
MAX_OBJECTS = 1 << 16
"""JSON objects and lists in a body, at most."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked for."""

    model: str
    """ "": the server's only one."""
    prompts: tuple[Tensor, ...]
    """Tensors of one kind: `messages`, `text_input` or `input_ids`."""
    id_prefix: str
    """What the ids of its responses begin with."""
    prompt_field: str
    """The client's field that the prompts come from."""
    sampling: dict[str, Any]
    """Sampling parameters under vLLM's names."""
    n: int = 1
    """Choices of each prompt. Those of the first one come first."""
    num_generations: int = 1
    """Of all prompts: as many as choices, or more of which the best are chosen."""
    stream: StreamOptions | None = None
    """None: one whole response."""
    logprobs: LogprobForm | None = None
    """None: no logprobs."""
    return_token_ids: bool = False
    """Whether the answer's token ids come along."""
    stream_interval_tokens: int = 1
    """How many tokens of a choice go out together."""
    prompt_form: PromptForm = NO_PROMPT_FORM
    """What the answer says of the prompts."""
    labels: dict[str, Any] = field(default_factory=dict)
    """What the client calls the request."""
    echo: tuple[str, ...] = ("",)
    """The text before each choice's own, by prompt; "" where none was asked for, or the model must tell it."""
    sent_fields: tuple[str, ...] = ()
    """The sampling fields that the client sent."""
    max_tokens_field: str = ""
    """The field in which it limited the answer, "" when it did not."""
    structure_field: str = STRUCTURED_OUTPUTS
    """The field that the sampling parameter `structured_outputs` comes from."""
    schema_field: str = ""
    """Where in it a JSON schema stands."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Further names of chat's fields and of sampling parameters → the client's own."""
    request_id: str = ""
    """The client's own, "" when it named none."""
    tool_use: ToolUse | None = None
    """None: no tool may be called."""
    reasoning: ReasoningUse = NO_REASONING_USE
    prior_output_ids: tuple[int, ...] = ()
    """Tokens that an interrupted generation of the same request has sent: it goes on behind them. Such a request has
    one choice, and a seed unless its temperature is 0."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def is_chat(self) -> bool:
        return self.prompts[0].name == MESSAGES

    def in_own_fields(self, error: OpenAIError) -> OpenAIError:
        """An error of the model with the request's names of fields."""
        if error.param == "max_tokens" and self.max_tokens_field:
            error.param = self.max_tokens_field
            error.message = error.message.replace("'max_tokens'", f"'{self.max_tokens_field}'")
        elif error.param == STRUCTURED_OUTPUTS and self.structure_field != STRUCTURED_OUTPUTS:
            return in_structure_field(error, self.structure_field, self.schema_field)
        elif error.code == CONTEXT_LENGTH_EXCEEDED and error.param is None:
            error.param = self.prompt_field
            if self.prompt_field != MESSAGES:
                error.message = error.message.replace(f"input '{MESSAGES}'", f"'{self.prompt_field}'")
        elif error.param is None and error.status == 400 and f"input '{INPUT_IDS}'" in error.message:
            error.param = self.prompt_field
            error.message = error.message.replace(f"input '{INPUT_IDS}'", f"'{self.prompt_field}'")
        elif error.param is not None and (own := self.field_names.get(error.param)) is not None:
            error.message = error.message.replace(f"'{error.param}'", f"'{own}'")
            error.param = own
        return error


def check_content_type(request: Request) -> None:
    """Raises OpenAIError 415 for another Content-Type than JSON: a browser sends such a body to another site without
    asking that site first (CORS). vLLM's rule and text."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OpenAIError(
            "Unsupported Media Type: Only 'application/json' is allowed", status=415, code="unsupported_media_type"
        )


async def read_body(gate: InferenceGate, request: Request, max_bytes: int) -> bytes:
    """The request's body, unpacked.

    Raises OpenAIError 413 for more than `max_bytes`, packed or unpacked, and 415 for an unknown encoding; TritonError
    as `request_body.read_content`.
    """
    if (encoding := content_encoding(request)) not in (*ENCODINGS, IDENTITY):
        raise OpenAIError(
            f"Content-Encoding is {shown(encoding)}, expected one of {', '.join((*ENCODINGS, IDENTITY))}",
            status=415,
            code="unsupported_content_encoding",
        )
    try:
        return await gate.read_content(request, max_bytes)
    except BodyTooLargeError:
        raise _too_large(max_bytes) from None


def decode_cost(body: bytes) -> int:
    """As how many bytes a body counts for `decode_in_thread`: many small objects take longer than one long text."""
    return max(len(body), _OBJECT_BYTES * body.count(b"{"))


def json_object(body: bytes) -> dict[str, Any]:
    """`body` parsed.

    Raises OpenAIError 400 for anything but a JSON object, and for nesting beyond MAX_DEPTH of `json_reader`;
    TritonError INVALID_ARG for more than MAX_OBJECTS objects and lists, which a parser would need too long for.
    """
    check_objects(body, MAX_OBJECTS)
    try:
        check_depth(body)
        value = orjson.loads(body)
    except (orjson.JSONDecodeError, TritonError) as error:
        raise OpenAIError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise OpenAIError("the request body is not a JSON object", code="invalid_json")
    return value


def _too_large(max_bytes: int) -> OpenAIError:
    return OpenAIError(
        f"the request body is larger than the {max_bytes} bytes this server accepts; "
        "use --openai-max-input-size to increase the limit",
        status=413,
        code="content_too_large",
    )


def with_defaults(body: JsonObject, defaults: RequestDefaults) -> JsonObject:
    """`body` with the operator's values of fields that it leaves out."""
    added: JsonObject = {}
    if defaults.return_tokens_as_token_ids and body.get("logprobs") not in (None, False):
        added["return_tokens_as_token_ids"] = True
    if body.get("stream") is True:
        if defaults.stream_interval_tokens > 1:
            added["stream_interval"] = defaults.stream_interval_tokens
        options = body.get("stream_options") or {}
        if defaults.force_include_usage and isinstance(options, dict):
            body = body | {"stream_options": options | {"include_usage": True}}
    return {**added, **body}


def parse_chat(body: JsonObject) -> GenerationRequest:
    """Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields = read(ChatCompletionRequest, body)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise refuse("top_logprobs", "to be sent only with 'logprobs': true", fields.top_logprobs)
    tool_use = fields.tool_use()
    prompt, messages = chat_prompt(fields, body, tool_use)
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    form = PromptForm(
        has_rendered_text=bool(fields.return_prompt_text),
        has_token_ids=bool(fields.return_token_ids),
        logprobs=fields.prompt_logprobs,
    )
    echo = _last_words(messages[-1]) if fields.echo else ""
    request = _request(fields, body, (prompt,), (echo,), top_logprobs, form)
    return dataclasses.replace(request, tool_use=tool_use, reasoning=fields.reasoning_use())


def chat_prompt(
    fields: ChatPromptFields, body: JsonObject, tool_use: ToolUse | None
) -> tuple[Tensor, list[JsonObject]]:
    """The prompt of a chat, and its messages as the template reads them. `body`: what `fields` were read from."""
    messages = [for_template(message, f"messages[{index}]") for index, message in enumerate(fields.messages)]
    options = {name: body[name] for name in _TEMPLATE_OPTIONS if body.get(name) is not None}
    if taken := TEMPLATE_NAMES & (fields.chat_template_kwargs or {}).keys():
        raise refuse("chat_template_kwargs", f"variables other than {' and '.join(sorted(TEMPLATE_NAMES))}", min(taken))
    if tool_use is not None:
        options["tools"] = tool_use.tools
    return messages_tensor(messages, options), messages


def _last_words(message: JsonObject) -> str:
    """The text of a last message that has the answer's role."""
    return str(message["content"]) if message["role"] == "assistant" else ""


def parse_completion(body: JsonObject) -> GenerationRequest:
    """Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields = read(CompletionRequest, body)
    if fields.suffix and fields.echo:
        message = "'suffix' is not supported: 'echo' would give the prompt without it"
        raise OpenAIError(message, param="suffix", code="unsupported_parameter")
    prompts = fields.prompts()
    tensors = tuple(text_tensor(item) if isinstance(item, str) else input_ids_tensor(item) for item in prompts)
    echo = tuple(item if fields.echo and isinstance(item, str) else "" for item in prompts)
    form = PromptForm(
        has_text=bool(fields.echo) and isinstance(prompts[0], list),
        has_echoed_logprobs=bool(fields.echo) and fields.logprobs is not None,
        has_token_ids=bool(fields.return_token_ids),
        logprobs=fields.prompt_logprobs,
    )
    return _request(fields, body, tensors, echo, fields.logprobs, form)


def _request(
    fields: ChatCompletionRequest | CompletionRequest,
    body: JsonObject,
    prompts: tuple[Tensor, ...],
    echo: tuple[str, ...],
    top_logprobs: int | None,
    prompt_form: PromptForm,
) -> GenerationRequest:
    sampling = fields.chosen_sampling() | fields.chosen_structure()
    limit = next((name for name in _MAX_TOKENS_FIELDS if body.get(name) is not None), "")
    sent_fields = (*sampling, limit) if limit else tuple(sampling)
    most = sampling["max_tokens"] = body[limit] if limit else fields.default_max_tokens
    if most is not None and (fields.min_tokens or 0) > most:
        raise refuse("min_tokens", f"at most max_tokens ({most})", fields.min_tokens)
    if top_logprobs is not None:
        sampling["logprobs"] = top_logprobs
        if prompt_form.has_echoed_logprobs:
            sampling["prompt_logprobs"] = top_logprobs
    if (wanted := fields.prompt_logprobs) is not None:
        sampling["prompt_logprobs"] = wanted if wanted < 0 else max(wanted, sampling["prompt_logprobs"])
    n, best_of = _choices(fields, len(prompts))
    is_chat = isinstance(fields, ChatCompletionRequest)
    if best_of > 1:
        sampling |= {"n": n, "best_of": best_of}
    return GenerationRequest(
        model=fields.model or "",
        prompts=prompts,
        id_prefix="chatcmpl-" if is_chat else "cmpl-",
        prompt_field="messages" if is_chat else "prompt",
        n=n,
        num_generations=best_of * len(prompts),
        sampling=sampling,
        stream=_stream_options(fields, body),
        logprobs=_logprob_form(fields, top_logprobs),
        return_token_ids=bool(fields.return_token_ids),
        stream_interval_tokens=_stream_interval_tokens(fields),
        prompt_form=prompt_form,
        labels=fields.sent_labels(),
        echo=echo,
        sent_fields=sent_fields,
        max_tokens_field=limit,
        structure_field=fields.structure_field,
        schema_field=fields.schema_field,
        request_id=fields.request_id or "",
    )


def _stream_interval_tokens(fields: ChatCompletionRequest | CompletionRequest) -> int:
    if fields.stream_interval is not None and not fields.stream:
        raise refuse("stream_interval", "to be sent only with 'stream': true", fields.stream_interval)
    return fields.stream_interval or 1


def _choices(fields: ChatCompletionRequest | CompletionRequest, num_prompts: int) -> tuple[int, int]:
    """How many of each prompt are sent, and how many are generated."""
    n = fields.n or 1
    best_of = n if fields.best_of is None else fields.best_of
    if best_of < n:
        raise refuse("best_of", f"at least n ({n})", best_of)
    if best_of > n and fields.stream:
        raise refuse("best_of", f"n ({n}) in a stream: which choices are the best is known at the end", best_of)
    if best_of * num_prompts > MAX_CHOICES:
        most = f"at most {MAX_CHOICES // num_prompts} for {num_prompts} prompts: {MAX_CHOICES} choices in one request"
        raise refuse("best_of" if best_of > n else "n", most, best_of)
    return n, best_of


def _logprob_form(fields: ChatCompletionRequest | CompletionRequest, top_logprobs: int | None) -> LogprobForm | None:
    as_token_ids, token_ids = bool(fields.return_tokens_as_token_ids), fields.logprob_token_ids or ()
    if top_logprobs is not None:
        return LogprobForm(top_logprobs, as_token_ids, tuple(map(str, token_ids)))
    if as_token_ids:
        raise refuse("return_tokens_as_token_ids", "to be sent only with 'logprobs'", True)
    if token_ids:
        raise refuse("logprob_token_ids", "to be sent only with 'logprobs'", token_ids)
    return None


def _stream_options(fields: ChatCompletionRequest | CompletionRequest, body: JsonObject) -> StreamOptions | None:
    options = fields.stream_options
    if not fields.stream:
        if options is not None:
            raise refuse("stream_options", "to be sent only with 'stream': true", body["stream_options"])
        return None
    return options or _NO_OPTIONS
