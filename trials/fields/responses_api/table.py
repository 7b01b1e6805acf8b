"""All fields of a create-response request: which of them OpenAI and vLLM have, and the row for each.

Sources: OpenAI's from the types in its Python package; vLLM's from its ResponsesRequest (autumn 2026).
"""

from __future__ import annotations

from typing import Final

from openai.types.responses import response_create_params

from ..api import Api
from ..table import Label, Refused, Row
from .answers import ANSWERS
from .asking import RESPONSES, Responses
from .prompts import PROMPTS
from .sampling import SAMPLING

_VLLM: Final = frozenset(
    [
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "logit_bias",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "reasoning",
        "service_tier",
        "store",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "top_k",
        "truncation",
        "user",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "prompt_cache_key",
        "presence_penalty",
        "frequency_penalty",
        "watermarking",
        "request_id",
        "session_id",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "priority",
        "cache_salt",
        "enable_response_messages",
        "previous_input_messages",
        "structured_outputs",
        "repetition_penalty",
        "seed",
        "stop",
        "ignore_eos",
        "vllm_xargs",
        "kv_transfer_params",
        "ec_transfer_params",
        "chat_template_kwargs",
    ]
)
_REFUSED: Final[dict[str, Row]] = {
    "prompt": Refused([{"id": "pmpt_1"}]),
    "access_programs": Refused([{}]),
    "context_management": Refused([[{"type": "compaction", "compact_threshold": 1000}]]),
    "image": Refused([{"quality": "low"}], [{}]),
    "moderation": Refused([{"model": "omni-moderation-latest"}]),
    "prompt_cache_options": Refused([{"mode": "explicit"}], [{"mode": "implicit"}]),
    "service_tier": Refused(["flex", "priority"], ["auto", "default"]),
    "media_io_kwargs": Refused([{"image": {}}], [{}]),
    "mm_processor_kwargs": Refused([{"num_crops": 4}], [{}]),
    "watermarking": Refused([True], [False]),
    "kv_transfer_params": Refused([{}]),
    "ec_transfer_params": Refused([{}]),
    "vllm_xargs": Refused([{"one": 1}], [{}]),
    "request_id": Refused(["mine"]),
    "prompt_logprobs": Refused([1]),
    "personality": Refused(["friendly"]),
    "previous_input_messages": Refused([[{"role": "user", "content": "x"}]]),
}
_LABELS: Final[dict[str, Row]] = {
    "user": Label("bob"),
    "safety_identifier": Label("id-7"),
    "prompt_cache_key": Label("key"),
    "prompt_cache_retention": Label("24h"),
    "session_id": Label("session-7"),
    "client_metadata": Label({"run": "7"}),
}
_OPENAI: Final = frozenset({*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"})
API: Final = Api(
    RESPONSES,
    "`/v1/responses`",
    {"OpenAI": _OPENAI, "vLLM": _VLLM},
    PROMPTS | SAMPLING | ANSWERS | _REFUSED | _LABELS,
    Responses,
)
