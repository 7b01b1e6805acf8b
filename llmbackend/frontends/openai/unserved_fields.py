"""Fields of the two endpoints that are refused by name, with the reason, and the values of them that ask for nothing.

For: the models of schema.py, which have these fields; docs/fields.md, which lists them. Does not know: fields that are
acted on. Invariant: every value that would change something is refused.
Source: OpenAI's API reference, and vLLM's protocol.py of both endpoints.
"""

from typing import Annotated, Any

from .validation import ClosedObject, Only

_ONE_TIER = "this server has one service tier"
_NOT_STORED = "this server stores the answers of /v1/responses alone"
_RENDER = "it belongs to vLLM's render endpoints"
_ONE_ENGINE = "the KV memory of a request stays in one engine"
_TEXT_ONLY = "the models here read and write text only"
_NO_BEAMS = "beam search is not implemented; 'n' and 'best_of' sample several choices"


class UnservedFields(ClosedObject):
    """Of both endpoints."""

    use_beam_search: Annotated[Any, Only(False, reason=_NO_BEAMS)] = None
    length_penalty: Annotated[Any, Only(1, 1.0, reason="it belongs to beam search")] = None
    store: Annotated[Any, Only(False, reason=_NOT_STORED)] = None
    service_tier: Annotated[Any, Only("auto", "default", reason=_ONE_TIER)] = None
    watermarking: Annotated[Any, Only(False, reason="this server marks no tokens")] = None
    kv_transfer_params: Annotated[Any, Only(reason=_ONE_ENGINE)] = None
    ec_transfer_params: Annotated[Any, Only(reason=_ONE_ENGINE)] = None
    repetition_detection: Annotated[
        Any, Only(reason="repetition does not end a generation; 'stop', 'max_tokens' and the penalties limit it")
    ] = None
    routed_experts_prompt_start: Annotated[Any, Only(0, reason="the experts of a token are not reported")] = None
    return_token_offsets: Annotated[Any, Only(False, reason=_RENDER)] = None
    return_mm_kwargs: Annotated[Any, Only(True, reason=_RENDER)] = None
    truncation_side: Annotated[Any, Only("left", reason="truncate_prompt_tokens keeps the end of a prompt")] = None
    vllm_xargs: Annotated[Any, Only({}, reason="no extension of this server reads them")] = None


class MediaFields(ClosedObject):
    """Of everything with messages."""

    media_io_kwargs: Annotated[Any, Only({}, reason=_TEXT_ONLY)] = None
    mm_processor_kwargs: Annotated[Any, Only({}, reason=_TEXT_ONLY)] = None


class UnservedByChat(MediaFields):
    """Of chat completions."""

    modalities: Annotated[Any, Only(["text"], reason=_TEXT_ONLY)] = None
    audio: Annotated[Any, Only(reason=_TEXT_ONLY)] = None
    prediction: Annotated[
        Any, Only(reason="drafts are made by the engine ('speculative_config') and not taken from a request")
    ] = None
    verbosity: Annotated[Any, Only("medium", reason="no model here was trained for it")] = None
    web_search_options: Annotated[Any, Only(reason="this server searches nothing")] = None
    moderation: Annotated[Any, Only(reason="this server has no moderation model")] = None
    prompt_cache_options: Annotated[
        Any, Only({"mode": "implicit"}, reason="every prefix is cached as long as there is room")
    ] = None


class UnservedByCompletions(ClosedObject):
    """Of completions."""

    thinking_token_budget: Annotated[
        Any, Only(-1, reason="the text of a completion is not read for reasoning; chats have it")
    ] = None
    prompt_embeds: Annotated[Any, Only(reason="prompts are text or token ids")] = None
