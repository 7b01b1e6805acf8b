"""SamplingParams: sampling parameters with vLLM's names, for programs that embed an engine.

Does not know: ranges, which the adapter checks as for any client (adapter/schemas/sampling.py). Invariant: each field
is a sampling parameter of a server, and unset fields have the model's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An unset field has the default of the model's generation_config.json, else the one that ends its line.

    max_tokens                     of the output; None = the rest of the context; 16
    min_tokens                     of the output, which does not end before; 0
    temperature                    0 = always the most likely token; 1
    top_k                          only so many most likely tokens; 0 = all
    top_p                          only the most likely tokens that together have this probability; 1
    min_p                          only tokens with this share of the most likely one's probability; 0
    seed                           the same seed gives the same tokens; None = drawn
    n                              outputs of a prompt; 1
    best_of                        generated outputs, of which the n most likely ones are returned; n
    stop                           texts that end the output
    stop_token_ids                 tokens that end the output, beside the model's own
    include_stop_str_in_output     False
    ignore_eos                     whether the model's end tokens do not end the output; False
    repetition_penalty             1 = none
    presence_penalty               0 = none
    frequency_penalty              0 = none
    logit_bias                     by token id, -100 to 100
    allowed_token_ids              the only tokens that may be generated
    bad_words                      texts that must not be generated
    logprobs                       None = none; n = of the token and of the n most likely ones
    logprob_token_ids              further tokens whose logprobs are returned
    prompt_logprobs                as logprobs, for the prompt
    structured_outputs             form of the output: {"json": schema}, {"regex": "…"}, {"choice": […]}, …
    skip_special_tokens            True
    spaces_between_special_tokens  True
    add_special_tokens             whether the tokenizer adds its own to a text; by default to a prompt, not to messages
    truncate_prompt_tokens         number of prompt tokens to keep
    truncation_side                the end of the prompt that is cut: "left" or "right"
    suffix                         text after the generated one, for fill-in-the-middle models
    lora_name                      the adapter
    cache_salt                     only requests with the same salt share cached prefixes
    priority                       priority level of the model, 1 first
    """

    max_tokens: int | None = 16
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
