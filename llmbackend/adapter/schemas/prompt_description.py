"""Outputs that describe a prompt and its sampling parameters (vLLM's names), for requests that generate nothing. No
single call, except copies of memory, holds the GIL for a time proportional to the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from llmbackend.core.backend_api import Tensor, invalid_argument

from ..text.tokenizer import ModelTokenizer, no_tokenizer
from .sampling import GenerationParams
from .schema import LlmInputs, Prompt

PROMPT_TOKENS: Final = "prompt_tokens"
MAX_MODEL_LEN: Final = "max_model_len"
SAMPLING_PARAMETERS: Final = "sampling_parameters"
TOKENIZER_CONFIG: Final = "tokenizer_config"
ONLY_DESCRIPTION_OUTPUTS: Final = frozenset({PROMPT_TOKENS, MAX_MODEL_LEN, SAMPLING_PARAMETERS, TOKENIZER_CONFIG})
"""Generations cannot request them."""
DESCRIPTION_OUTPUTS: Final = ONLY_DESCRIPTION_OUTPUTS | {"prompt_token_ids", "prompt_text", "num_input_tokens"}
_OF_TEXT: Final = frozenset({PROMPT_TOKENS, TOKENIZER_CONFIG, "prompt_text"})
_FILES: Final = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
"""Fields of a tokenizer's configuration that contain paths."""
_TOKENS_PER_CALL: Final = 8192


def described(prompt: Prompt, inputs: LlmInputs, tokenizer: ModelTokenizer, max_model_len_tokens: int) -> list[Tensor]:
    """The requested outputs among DESCRIPTION_OUTPUTS. The text of a prompt given as token ids has special tokens."""
    ids, outputs, tensors = prompt.token_ids, inputs.options.outputs, []
    if not tokenizer.has_text and (asked := outputs & _OF_TEXT):
        raise no_tokenizer(f"'return_{min(asked)}' is true")
    if "prompt_token_ids" in outputs:
        parts = [np.array(part, np.int32) for part in _parts(ids)]
        tensors.append(Tensor.of("prompt_token_ids", np.concatenate(parts)))
    if PROMPT_TOKENS in outputs:
        names = (msgspec.json.encode([*map(tokenizer.token_name, part)])[1:-1] for part in _parts(ids))
        tensors.append(Tensor.text(PROMPT_TOKENS, b"[%b]" % b",".join(names)))
    if "prompt_text" in outputs:
        text = prompt.text if inputs.input_ids is None else tokenizer.decode(ids, skip_special_tokens=False)
        tensors.append(Tensor.text("prompt_text", text))
    if TOKENIZER_CONFIG in outputs:
        config = {name: value for name, value in tokenizer.config.items() if name not in _FILES}
        config["chat_template"] = tokenizer.chat_template or None
        tensors.append(Tensor.text(TOKENIZER_CONFIG, msgspec.json.encode(config)))
    for name, count in (("num_input_tokens", len(ids)), (MAX_MODEL_LEN, max_model_len_tokens)):
        if name in outputs:
            tensors.append(Tensor.of(name, np.array([count], np.uint32)))
    return tensors


def _parts(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[start : start + _TOKENS_PER_CALL] for start in range(0, max(len(ids), 1), _TOKENS_PER_CALL)]


_OWN = ("n", "stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "bad_words")
"""Fields of GenerationParams."""


def sampling_json(params: GenerationParams, sent: Mapping[str, Any]) -> bytes:
    """The effective parameters (with the model's defaults, cut to the context) as JSON. sent: those in the request."""
    values: dict[str, Any] = {name: getattr(params.sampling, name) for name in params.sampling.__struct_fields__}
    values |= {name: getattr(params, name) for name in _OWN}
    values["seed"] = values["seed"] if sent.get("seed") not in (None, -1) else None
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        values[name] = values[name] or None
    values["structured_outputs"] = sent.get("structured_outputs")
    try:
        return msgspec.json.encode(values)
    except UnicodeEncodeError:  # the others have been checked
        raise invalid_argument(
            "sampling parameter 'structured_outputs' holds half of a surrogate pair, expected text",
            param="structured_outputs",
        ) from None
