"""Refused fields, with values that must be refused and values that request nothing; and the labels."""

from __future__ import annotations

from .table import Label, Refused, Row

REFUSED: dict[str, Row] = {
    "use_beam_search": Refused([True], [False]),
    "length_penalty": Refused([0.5], [1, 1.0]),
    "service_tier": Refused(["flex", "priority"], ["auto", "default"]),
    "watermarking": Refused([True], [False]),
    "kv_transfer_params": Refused([{}]),
    "ec_transfer_params": Refused([{}]),
    "repetition_detection": Refused([{"max_pattern_size": 4}]),
    "routed_experts_prompt_start": Refused([1], [0]),
    "return_token_offsets": Refused([True], [False]),
    "return_mm_kwargs": Refused([False], [True]),
    "include_metrics": Refused([True], [False]),
    "vllm_xargs": Refused([{"one": 1}], [{}]),
}
CHAT_REFUSED: dict[str, Row] = {
    "modalities": Refused([["text", "audio"]], [["text"]]),
    "audio": Refused([{"voice": "alloy", "format": "wav"}]),
    "media_io_kwargs": Refused([{"image": {}}], [{}]),
    "mm_processor_kwargs": Refused([{"num_crops": 4}], [{}]),
    "prediction": Refused([{"type": "content", "content": "x"}]),
    "verbosity": Refused(["low"], ["medium"]),
    "web_search_options": Refused([{}]),
    "moderation": Refused([{"model": "omni-moderation-latest"}]),
    "prompt_cache_options": Refused([{"mode": "explicit"}], [{"mode": "implicit"}]),
}
COMPLETION_REFUSED: dict[str, Row] = {
    "store": Refused([True], [False]),
    "prompt_embeds": Refused(["AAAA"]),
    "thinking_token_budget": Refused([5], [-1]),
}
LABELS: dict[str, Row] = {
    "user": Label("bob"),
    "safety_identifier": Label("id-7"),
    "prompt_cache_key": Label("key"),
    "prompt_cache_retention": Label("24h"),
    "session_id": Label("session-7"),
    "metadata": Label({"run": "7"}),
}
