"""All fields: which of them OpenAI and vLLM have, and the row for each.

Sources: OpenAI's from the types in its Python package; vLLM's from protocol.py of both endpoints (autumn 2026), and
those of older releases.
"""

from __future__ import annotations

from typing import Final

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from .agents import AGENTS, CHAT_AGENTS
from .answers import ANSWERS, CHAT_ANSWERS, COMPLETION_ANSWERS
from .api import Api
from .asking import CHAT, COMPLETIONS, Endpoint
from .conversations import CONVERSATIONS
from .messages_api.table import COUNT_API, MESSAGE_API
from .prompts import CHAT_PROMPTS, COMPLETION_PROMPTS, PROMPTS
from .refusals import CHAT_REFUSED, COMPLETION_REFUSED, LABELS, REFUSED
from .responses_api import counting, kinds, stored, table
from .sampling import SAMPLING
from .stored_chats import STORE, STORED_CHATS
from .structure import STRUCTURE
from .table import Row
from .tokenizing import TOKENIZING

_OPENAI: Final = {
    CHAT: {*chat_create_params.CompletionCreateParamsBase.__annotations__, "stream"},
    COMPLETIONS: {*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"},
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VLLM_BOTH: Final = _names(
    """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection stream_interval thinking_token_budget
    best_of guided_json guided_regex guided_choice guided_grammar"""
)
_VLLM: Final = {
    CHAT: _VLLM_BOTH
    | _names(
        """messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
        parallel_tool_calls add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs return_prompt_text"""
    ),
    COMPLETIONS: _VLLM_BOTH | {"prompt", "suffix", "prompt_embeds"},
}

_BOTH: dict[str, Row] = SAMPLING | ANSWERS | PROMPTS | STRUCTURE | AGENTS | REFUSED | LABELS
_ONLY_CHAT = ("max_completion_tokens",)
_ROWS: Final[dict[str, dict[str, Row]]] = {
    CHAT: _BOTH | CHAT_ANSWERS | CHAT_AGENTS | CHAT_PROMPTS | CHAT_REFUSED | STORE,
    COMPLETIONS: {name: row for name, row in _BOTH.items() if name not in _ONLY_CHAT}
    | COMPLETION_ANSWERS
    | COMPLETION_PROMPTS
    | COMPLETION_REFUSED,
}


def _generating(name: str) -> Api:
    published = {"OpenAI": frozenset(_OPENAI[name]), "vLLM": frozenset(_VLLM[name])}
    return Api(name, f"`/v1/{name}`", published, _ROWS[name], lambda client: Endpoint(client, name))


RESPONSES_APIS: Final = (
    table.API,
    kinds.ITEMS,
    kinds.TOOLS,
    kinds.INCLUDE,
    counting.API,
    stored.RETRIEVE,
    stored.INPUT_ITEMS,
)
APIS: Final[tuple[Api, ...]] = (
    _generating(CHAT),
    *STORED_CHATS,
    _generating(COMPLETIONS),
    *RESPONSES_APIS,
    *CONVERSATIONS,
    MESSAGE_API,
    COUNT_API,
    *TOKENIZING,
)
