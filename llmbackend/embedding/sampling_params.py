"""SamplingParams: sampling parameters with vLLM's names, for programs that embed an engine.

Ranges are checked by the adapter, as for any client (adapter/schemas/sampling.py). Invariant: each field is a sampling
parameter of a server, and unset fields have the model's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Unset fields have the default of the model's generation_config.json, else the value at the end of their line.

    max_tokens                     limit of the output; None = the model's, else the rest of the context; 16
    min_tokens                     the output does not end before this many tokens; 0
    temperature                    0 = always the most likely token; 1
    top_k                          sample from this many most likely tokens; 0 = all
    top_p                          sample from the most likely tokens with this total probability; 1
    min_p                          minimum probability relative to the most likely token; 0
    seed                           the same seed gives the same tokens; None = random
    n                              outputs per prompt; 1
    best_of                        outputs to generate, of which the n most likely are returned; n
    stop                           texts that end the output
    stop_token_ids                 tokens that end the output, in addition to the model's own
    include_stop_str_in_output     False
    ignore_eos                     whether to ignore the model's end-of-sequence tokens; False
    repetition_penalty             1 = none
    presence_penalty               0 = none
    frequency_penalty              0 = none
    logit_bias                     by token id, -100 to 100
    allowed_token_ids              the only tokens that may be generated
    bad_words                      texts that must not be generated
    logprobs                       None = none; n = those of the token and of the n most likely ones
    logprob_token_ids              further tokens whose logprobs are returned
    prompt_logprobs                as logprobs, for the prompt
    structured_outputs             form of the output: {"json": schema}, {"regex": "…"}, {"choice": […]}, …
    skip_special_tokens            True
    spaces_between_special_tokens  True
    add_special_tokens             whether to add the tokenizer's special tokens; by default to a text, not to messages
    truncate_prompt_tokens         number of prompt tokens to keep
    truncation_side                the side of the prompt to cut: "left" or "right"
    suffix                         text after the generated one, for fill-in-the-middle models
    lora_name                      the adapter
    cache_salt                     only requests with the same salt share cached prefixes
    priority                       priority level of the model, 1 first
    """

    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    suffix: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
