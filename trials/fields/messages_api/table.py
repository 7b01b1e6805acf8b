"""All fields of message requests and of counts: which Anthropic and vLLM have, and the row of each.

Sources: Anthropic's from the types of its Python package, those of betas from its beta types; vLLM's from its
AnthropicMessagesRequest (autumn 2026).
"""

from __future__ import annotations

from typing import Final

from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from ..api import Api
from ..table import Label, Refused, Row
from .asking import COUNT_TOKENS, MESSAGES, Messages
from .rows import COUNT_ROWS, ROWS

_CREATE: Final = frozenset({*message_create_params.MessageCreateParamsBase.__annotations__, "stream"})
_COUNT: Final = frozenset(message_count_tokens_params.MessageCountTokensParams.__annotations__)
_NO_MEMBER: Final = frozenset({"betas"})
"""The client sends it as a header."""
_BETA_CREATE: Final = frozenset(beta_create_params.MessageCreateParamsBase.__annotations__) - _CREATE - _NO_MEMBER
_BETA_COUNT: Final = frozenset(beta_count_params.MessageCountTokensParams.__annotations__) - _COUNT - _NO_MEMBER
_VLLM: Final = frozenset(
    [
        "model",
        "messages",
        "max_tokens",
        "metadata",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
        "kv_transfer_params",
        "chat_template_kwargs",
    ]
)
_REFUSED: Final[dict[str, Row]] = {
    "diagnostics": Refused([{"previous_message_id": "msg_1"}]),
    "inference_geo": Refused(["us"]),
    "speed": Refused(["fast"], ["standard"]),
    "service_tier": Refused(["priority"], ["auto", "standard_only"]),
    "user_profile_id": Refused(["profile-7"]),
    "workspace_id": Refused(["workspace-7"]),
    "container": Refused(["container_1"]),
    "billing_policy": Refused(["standard"]),
    "compaction": Refused([{"enabled": True}]),
    "context_management": Refused([{"edits": [{"type": "clear_tool_uses_20250919"}]}], [{"edits": []}]),
    "fallback_credit_token": Refused(["token"]),
    "fallbacks": Refused([[{"model": "demo"}]]),
    "mcp_servers": Refused([[{"type": "url", "name": "one", "url": "http://127.0.0.1:1"}]], [[]]),
    "thread": Refused([{"id": "thread_1"}]),
    "kv_transfer_params": Refused([{}]),
}
"""Under an `anthropic-beta` header they are passed over, but for `thread`."""
_LABELS: Final[dict[str, Row]] = {"metadata": Label({"user_id": "user-7"}, logged="user_id")}
_ONLY_MESSAGES: Final = ("service_tier",)


_BETA_NAME: Final = "Anthropic, beta"
MESSAGE_API: Final = Api(
    MESSAGES,
    "`/v1/messages`",
    {"Anthropic": _CREATE, _BETA_NAME: _BETA_CREATE, "vLLM": _VLLM},
    ROWS | _REFUSED | _LABELS,
    Messages,
)
COUNT_API: Final = Api(
    COUNT_TOKENS,
    "`/v1/messages/count_tokens`",
    {"Anthropic": _COUNT, _BETA_NAME: _BETA_COUNT},
    COUNT_ROWS | {field: row for field, row in _REFUSED.items() if field not in _ONLY_MESSAGES},
    lambda client: Messages(client, COUNT_TOKENS),
)
