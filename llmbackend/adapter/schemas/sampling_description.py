"""The sampling parameters of a request as they hold: what it said, the model's own defaults, cut to what has room.

For: request conversion. Does not know: how they are checked. Invariant: names and meanings are vLLM's SamplingParams';
a seed that the client did not choose is not told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .sampling import GenerationParams

_OWN = (
    "n",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
)


def sampling_json(params: GenerationParams, sent: Mapping[str, Any]) -> bytes:
    """`params` as a JSON object. sent: what the request said."""
    values: dict[str, Any] = {name: getattr(params.sampling, name) for name in params.sampling.__struct_fields__}
    values |= {name: getattr(params, name) for name in _OWN}
    values["seed"] = values["seed"] if sent.get("seed") not in (None, -1) else None
    values["logit_bias"] = values["logit_bias"] or None
    values["allowed_token_ids"] = values["allowed_token_ids"] or None
    values["logprob_token_ids"] = values["logprob_token_ids"] or None
    values["structured_outputs"] = sent.get("structured_outputs")
    return msgspec.json.encode(values)
