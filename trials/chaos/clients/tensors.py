"""The llm backend's tensors, as used by both KServe clients.

Used by the generate and gRPC clients. Independent of the wire format. Invariant: every available output is requested,
so that ids, logprobs, usage and finish reason are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..outcome import Piece
from ..specs import StreamSpec


def input_values(spec: StreamSpec) -> dict[str, str | bool]:
    """Names and values of the input tensors."""
    sampling = spec.sampling | ({} if spec.logprobs is None else {"logprobs": spec.logprobs})
    return {
        "text_input": spec.prompt,
        "stream": spec.streams,
        "sampling_parameters": json.dumps(sampling),
        "return_output_ids": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_logprobs": spec.logprobs is not None,
        "return_cumulative_logprob": spec.logprobs is not None,
    }


def piece_of(outputs: Mapping[str, Any], tokens_before: int) -> Piece:
    """One response; `outputs` are its tensors as plain values (ids as a list), `tokens_before` those of earlier
    responses."""
    token_ids = tuple(int(token) for token in outputs["output_ids"])
    reason = outputs["finish_reason"]
    count = int(outputs["num_output_tokens"])
    if count != len(token_ids):
        raise AssertionError(f"num_output_tokens is {count}, output_ids has {len(token_ids)}")
    return Piece(
        text=outputs["text_output"],
        token_ids=token_ids,
        logprobs=tuple(json.loads(outputs["logprobs"]) or ()) if "logprobs" in outputs else (),
        finish_reason=None if reason == "None" else reason,
        usage=(int(outputs["num_input_tokens"]), tokens_before + count),
        cumulative_logprob=float(outputs["cumulative_logprob"]) if "cumulative_logprob" in outputs else None,
    )
