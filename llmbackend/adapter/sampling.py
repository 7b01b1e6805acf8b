"""Sampling parameters as clients send them, checked and turned into the engine's message.

For: the one place where a parameter's name, cast and range are written down. Does not know: tensors, tokenizers,
engines.
Invariant: what comes out is complete and self-contained (a seed is always drawn), and every refusal names field, value
and range. Names and defaults are vLLM's SamplingParams; values may be strings, as vllm_backend's clients send them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmbackend.core.backend_api import invalid_argument, shown, unsupported
from llmbackend.engine.infer_request import SamplingParams

from .request_bounds import (
    MAX_LOGIT_BIAS,
    MAX_PARAMETERS,
    MAX_SAMPLING_JSON_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    check_count,
    check_stops,
    shown_keys,
)

MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
NO_DEFAULTS: Mapping[str, Any] = {}
SEED_MASK = (1 << 63) - 1

NOT_SUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "early_stopping",
        "extra_args",
        "flat_logprobs",
        "guided_choice",
        "guided_decoding",
        "guided_decoding_backend",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "length_penalty",
        "logits_processors",
        "output_kind",
        "prompt_logprobs",
        "response_format",
        "spaces_between_special_tokens",
        "structured_outputs",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)
"""Fields that vLLM has and this backend does not: refused by name rather than dropped."""

IGNORED_REQUEST_PARAMETERS = frozenset({"id"})
"""Request parameters that are not sampling parameters: generate passes the request's id as a parameter too."""


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """What one request asked for: the engine's part, the part that concerns text and stays in the adapter, with whom it
    shares the prefix cache, and the LoRA adapter."""

    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    lora_name: str = ""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Token ids that end it when they were generated one after the other."""


Parser = Callable[[str, Any], Any]


def _refuse(name: str, value: Any, expected: str) -> Exception:
    return invalid_argument(f"{_named(name)} is {shown(value)}, expected {expected}")


def _range_text(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    return "" if minimum is None else f" of at least {minimum}"


def _integer(minimum: int | None = None, maximum: int | None = None) -> Parser:
    expected = f"an integer{_range_text(minimum, maximum)}"

    def parse(name: str, value: Any) -> int:
        number: int
        try:
            if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
                raise ValueError
            number = int(value)
        except (ValueError, TypeError, OverflowError):
            raise _refuse(name, value, expected) from None
        if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
            raise _refuse(name, value, expected)
        return number

    return parse


def _number(minimum: float, maximum: float | None = None, *, open_minimum: bool = False) -> Parser:
    expected = f"a number{_range_text(minimum, maximum)}" if not open_minimum else f"a number above {minimum}"
    if open_minimum and maximum is not None:
        expected += f" and at most {maximum}"

    def parse(name: str, value: Any) -> float:
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
        except (ValueError, TypeError, OverflowError):
            raise _refuse(name, value, expected) from None
        too_small = number <= minimum if open_minimum else number < minimum
        if not math.isfinite(number) or too_small or (maximum is not None and number > maximum):
            raise _refuse(name, value, expected)
        return number

    return parse


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "false": False, "0": False}
    parsed = words.get(str(value).strip().lower()) if isinstance(value, str | int) else None
    if parsed is None:
        raise _refuse(name, value, "true or false")
    return parsed


def _named(name: str) -> str:
    return f"sampling parameter '{name}'"


def _from_json_text(name: str, value: Any) -> Any:
    """Lists and objects arrive as JSON text where the carrier has scalars only (request parameters)."""
    if isinstance(value, str):
        check_count(_named(name), len(value), MAX_SAMPLING_JSON_BYTES, "characters of JSON")
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list):
        check_count(_named(name), len(strings), MAX_STOPS, "strings")
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise _refuse(name, value, "a non-empty string or a list of them")
    check_stops(_named(name), strings, "strings", "characters")
    return tuple(dict.fromkeys(strings))


def _text(name: str, value: Any) -> str:
    try:
        if isinstance(value, str) and value.encode():  # JSON's texts may hold half of a surrogate pair
            return value
    except UnicodeEncodeError:
        pass
    raise _refuse(name, value, "a non-empty string")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = _from_json_text(name, value)
    if not isinstance(items, list):
        raise _refuse(name, value, "a list of token ids")
    check_count(_named(name), len(items), MAX_STOP_TOKEN_IDS, "token ids")
    parse = _integer(0)
    return tuple(dict.fromkeys(parse(name, item) for item in items))


def _logit_bias(name: str, value: Any) -> dict[Any, float]:
    """Keys that are no numbers stay as they came: `_check_vocabulary` names all wrong ones together."""
    items = _from_json_text(name, value)
    if not isinstance(items, dict):
        raise _refuse(name, value, "an object of token id to bias")
    check_count(_named(name), len(items), MAX_LOGIT_BIAS, "token ids")
    parse_bias = _number(-100.0, 100.0)
    return {_token_id(key): parse_bias(f"{name}[{str(key)[:24]}]", bias) for key, bias in items.items()}


def _token_id(key: Any) -> Any:
    """JSON's keys are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


_PARSERS: dict[str, Parser] = {
    "max_tokens": _integer(1),
    "min_tokens": _integer(0),
    "temperature": _number(0.0),
    "top_k": _integer(-1),
    "top_p": _number(0.0, 1.0, open_minimum=True),
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(0.0, open_minimum=True),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "logit_bias": _logit_bias,
    "seed": _integer(-(1 << 63), (1 << 63) - 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
    "cache_salt": _text,
    "lora_name": _text,
    "n": _integer(1, 1),
    "best_of": _integer(1, 1),
}
ACCEPTED = tuple(sorted(_PARSERS))


def parse_sampling_parameter(name: str, value: Any) -> Any:
    """One of them as `parse_sampling_parameters` reads it; None for null. Raises TritonError in the same cases."""
    return _parse_one(name, value)


def parse_sampling_parameters(
    values: Mapping[str, Any],
    *,
    room_tokens: int,
    vocab_size: int,
    logprobs_needed: bool = False,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> GenerationParams:
    """Checks `values` and builds the parameters of one request.

    room_tokens: how many tokens fit after the prompt; max_tokens is capped to it. vocab_size bounds token ids.
    logprobs_needed: the sampled token's logprob is wanted although `logprobs` was not asked for. defaults: the model's
    own, for what is left out or null; without one a max_tokens of null is all the room. No seed (or vLLM's -1) draws a
    random one.
    Raises TritonError INVALID_ARG for a bad value or unknown name, UNSUPPORTED for a vLLM field that is not built.
    """
    check_count("the request", len(values), MAX_PARAMETERS, "sampling parameters")
    fields = {name: _parse_one(name, value) for name, value in values.items() if name not in IGNORED_REQUEST_PARAMETERS}
    max_tokens = fields.pop("max_tokens", defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", room_tokens)
    max_tokens = min(max_tokens, room_tokens)
    chosen = {**defaults, **{name: value for name, value in fields.items() if value is not None}}
    chosen.pop("max_tokens", None)
    _check_min_tokens(chosen, values, max_tokens, room_tokens)
    _check_vocabulary(chosen, vocab_size)
    seed = chosen.pop("seed", -1)
    logprobs = chosen.pop("logprobs", 0 if logprobs_needed else None)
    top_k = chosen.pop("top_k", 0)
    others = {name: chosen.pop(name) for name in _OUTSIDE_SAMPLING if name in chosen}
    for name in ("n", "best_of"):
        chosen.pop(name, None)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=random.getrandbits(63) if seed == -1 else seed & SEED_MASK,
        logprobs=logprobs,
        top_k=min(max(top_k, 0), vocab_size),  # a larger one is off, and may be wider than the engine's integers
        **chosen,
    )
    return GenerationParams(sampling=sampling, **others)


_OUTSIDE_SAMPLING = ("stop", "include_stop_str_in_output", "skip_special_tokens", "cache_salt", "lora_name")


def _parse_one(name: str, value: Any) -> Any:
    if name in NOT_SUPPORTED:
        raise unsupported(f"sampling parameter '{name}' is not supported by this backend")
    parser = _PARSERS.get(name)
    if parser is None:
        raise invalid_argument(f"unknown sampling parameter {shown(name)}, expected one of: {', '.join(ACCEPTED)}")
    return None if value is None else parser(name, value)


def _check_min_tokens(chosen: dict[str, Any], values: Mapping[str, Any], max_tokens: int, room_tokens: int) -> None:
    minimum = chosen.get("min_tokens", 0)
    if minimum <= max_tokens:
        return
    if max_tokens < room_tokens:
        raise _refuse("min_tokens", values["min_tokens"], f"at most max_tokens ({max_tokens})")
    raise _refuse("min_tokens", values["min_tokens"], f"at most the {room_tokens} tokens that fit after the prompt")


def _check_vocabulary(chosen: dict[str, Any], vocab_size: int) -> None:
    for name in ("stop_token_ids", "logit_bias"):
        wrong = [key for key in chosen.get(name, ()) if not (isinstance(key, int) and 0 <= key < vocab_size)]
        if wrong:
            raise invalid_argument(
                f"{_named(name)} names {shown_keys(wrong)}, expected token ids from 0 to {vocab_size - 1}"
            )
