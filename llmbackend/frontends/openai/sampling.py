"""The fields that chat and completions share: how to choose tokens, and what the response carries.

For: the two request parsers. Does not know: messages, prompts, tensors. Invariant: each field either reaches the
model (under vLLM's name), or is known to change nothing, or is refused by name; nothing is dropped silently. Source:
OpenAI's API reference for names and ranges, vLLM's SamplingParams for the extras.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import refuse
from .fields import Fields

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
"""Fields this server knows and does not act on, with the values that ask for exactly what it does anyway."""

LABELS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Strings about the caller; they ask nothing of the model."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """include_usage: one last chunk with the usage. continuous_usage: the usage so far in every chunk (a vLLM
    extra)."""

    include_usage: bool = False
    continuous_usage: bool = False


def take_model(fields: Fields) -> str:
    model = fields.require("model")
    if not isinstance(model, str):
        raise refuse("model", "a string", model)
    return model


def take_stream(fields: Fields) -> StreamOptions | None:
    """None for a request that wants one whole response."""
    stream = fields.boolean("stream") or False
    value = fields.mapping("stream_options")
    if value is None:
        return StreamOptions() if stream else None
    if not stream:
        raise refuse("stream_options", "to be sent only with 'stream': true", value)
    options = Fields(value, "stream_options.")
    include = options.boolean("include_usage") or False
    continuous = options.boolean("continuous_usage_stats") or False
    options.only("include_obfuscation", (False,))
    options.finish()
    return StreamOptions(include, include and continuous)


def take_sampling(fields: Fields) -> dict[str, Any]:
    """Sampling parameters under vLLM's names; what the client left out stays out, so that the model's defaults hold.

    max_tokens and logprobs are not among them: the two endpoints read those differently.
    """
    chosen = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", -1),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0, 100),
        "logit_bias": fields.logit_bias("logit_bias"),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "stop": fields.strings("stop"),
        "stop_token_ids": fields.token_ids("stop_token_ids"),
        "min_tokens": fields.integer("min_tokens", 0),
        "ignore_eos": fields.boolean("ignore_eos"),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output"),
        "skip_special_tokens": fields.boolean("skip_special_tokens"),
        "cache_salt": fields.text("cache_salt"),
    }
    if chosen["cache_salt"] == "":
        raise refuse("cache_salt", "a non-empty string", "")
    if chosen["top_k"] == -1:  # vLLM's older spelling of "off"
        chosen["top_k"] = 0
    return {name: value for name, value in chosen.items() if value is not None}


def take_neutral(fields: Fields) -> None:
    """Takes the fields that change nothing; refuses by name those that would have to."""
    for name in LABELS:
        fields.text(name)
    fields.boolean("parallel_tool_calls")
    fields.object("metadata")
    for name, accepted in NEUTRAL.items():
        fields.only(name, accepted)


def check_min_tokens(sampling: dict[str, Any]) -> None:
    most = sampling["max_tokens"]
    if most is not None and sampling.get("min_tokens", 0) > most:
        raise refuse("min_tokens", f"at most max_tokens ({most})", sampling["min_tokens"])
