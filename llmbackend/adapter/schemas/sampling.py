"""Checks the sampling parameters of requests and of generation_config.json, and builds the engine's message.

Used by request conversion. The only place that has each parameter's name, type and range. Independent of tensors and
engines. Invariants: the result is complete (a seed is always drawn); every refusal names parameter, value and range.
Sources: vLLM's SamplingParams and ModelConfig.get_diff_sampling_param (applied by vLLM's OpenAI server, not by
vllm_backend). Values may be strings, as in vllm_backend.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from llmbackend.core.backend_api import TritonError, invalid_argument, shown, unsupported
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.messages import SamplingParams

from ..limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PARAMETERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    check_at_most,
    check_stops,
    shown_keys,
)
from ..structured_outputs import constraint as constraints
from ..structured_outputs.constraint import Constraint
from ..structured_outputs.reasoning import FIELDS as REASONING_FIELDS
from ..structured_outputs.reasoning import ReasoningParams, read_reasoning
from ..text.tokenizer_files import GENERATION_CONFIG_FILE
from ..text.tokenizer_loading import local_directory, read_json

logger = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16
NO_DEFAULTS: Mapping[str, Any] = {}
SEED_MASK = (1 << 63) - 1

NOT_SUPPORTED = frozenset(
    {
        "detokenize", "early_stopping", "extra_args", "flat_logprobs", "length_penalty", "logits_processors",
        "output_kind", "response_format", "use_beam_search",
    }
)  # fmt: skip
"""vLLM parameters that this backend does not support; they are refused by name."""

IGNORED_REQUEST_PARAMETERS = frozenset({"id"})
"""Request parameters that are not sampling parameters: `generate` passes the request's id as a parameter."""


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """One request's checked sampling parameters."""

    sampling: SamplingParams
    """The part for the engine."""
    stop: tuple[str, ...] = ()
    """Stop strings, matched by the adapter."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    lora_name: str = ""
    """The LoRA adapter; "" = none."""
    n: int = 1
    """How many choices the client gets."""
    spaces_between_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated."""
    priority: int = 0
    """The priority level; 0 = the request's, or else the model's default."""
    best_of: int = 1
    """How many choices are generated; the client gets the n with the largest cumulative logprob."""
    constraint: Constraint | None = None
    """Structured output."""
    reasoning: ReasoningParams | None = None
    """The model's reasoning markers, and the budget."""

    def of_choice(self, index: int) -> GenerationParams:
        """The parameters of one choice as if it were alone: the seed is increased by `index`."""
        sampling = msgspec.structs.replace(self.sampling, seed=(self.sampling.seed + index) & SEED_MASK)
        if index:  # the first choice has them on behalf of all
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return replace(self, sampling=sampling, n=1, best_of=1)


Parser = Callable[[str, Any], Any]


def _refuse(name: str, value: Any, expected: str) -> Exception:
    return invalid_argument(f"{_named(name)} is {shown(value)}, expected {expected}", param=name)


def _number(
    kind: type[int] | type[float], minimum: float, maximum: float | None = None, *, is_open: bool = False
) -> Parser:
    """is_open: whether the minimum itself is excluded"""
    noun = "an integer" if kind is int else "a number"
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    expected = f"{noun} above {minimum}" if is_open else f"{noun} {limits}"

    def parse(name: str, value: Any) -> Any:
        try:
            if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):
                raise ValueError
            number = kind(value)
        except (ValueError, TypeError, OverflowError):
            raise _refuse(name, value, expected) from None
        is_below = number <= minimum if is_open else number < minimum
        is_above = maximum is not None and number > maximum
        if is_below or is_above or (kind is float and not math.isfinite(number)):
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


def _from_json_text(value: Any) -> Any:
    """Request parameters can only be scalars, so lists and objects are passed as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list):
        check_at_most(_named(name), len(strings), MAX_STOPS, "strings")
    if not isinstance(strings, list) or not all(item and _is_text(item) for item in strings):
        raise _refuse(name, value, "a non-empty string or a list of them")
    check_stops(_named(name), strings, "strings", "characters")
    return tuple(dict.fromkeys(strings))


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half of a surrogate pair, which a JSON string may contain
        return False


def _text(name: str, value: Any) -> str:
    if value and _is_text(value):
        return str(value)
    raise _refuse(name, value, "a non-empty string")


def _cache_salt(name: str, value: Any) -> str:
    salt = _text(name, value)
    check_at_most(_named(name), len(salt), MAX_CACHE_SALT_CHARS, "characters")
    return salt


def _suffix(name: str, value: Any) -> str:
    return _text(name, value) if value != "" else ""


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    token_ids = _token_ids(name, value, MAX_ALLOWED_TOKEN_IDS)
    if not token_ids:
        raise _refuse(name, value, "at least one token id")
    return token_ids


def _token_ids(name: str, value: Any, most: int = MAX_STOP_TOKEN_IDS) -> tuple[int, ...]:
    items = _from_json_text(value)
    if not isinstance(items, list):
        raise _refuse(name, value, "a list of token ids")
    check_at_most(_named(name), len(items), most, "token ids")
    parse = _number(int, 0)
    return tuple(dict.fromkeys(parse(name, item) for item in items))


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    words = _from_json_text(value)
    if not isinstance(words, list) or not all(_is_text(word) and word.strip() for word in words):
        raise _refuse(name, value, "a list of strings that are not empty")
    check_stops(_named(name), words, "words", "characters")
    return tuple(dict.fromkeys(words))


def _truncation(name: str, value: Any) -> int:
    count: int = _number(int, -1)(name, value)
    if not count:
        raise _refuse(name, value, "at least 1, or -1 for as many as fit")
    return count


def _one_of(*choices: str) -> Parser:
    def parse(name: str, value: Any) -> str:
        if value not in choices:
            raise _refuse(name, value, f"one of {', '.join(choices)}")
        return str(value)

    return parse


def _logit_bias(name: str, value: Any) -> dict[Any, float]:
    """Invalid keys are kept: `_check_vocabulary` names all of them in one error."""
    items = _from_json_text(value)
    if not isinstance(items, dict):
        raise _refuse(name, value, "an object of token id to bias")
    check_at_most(_named(name), len(items), MAX_LOGIT_BIAS, "token ids")
    parse_bias = _number(float, -100.0, 100.0)
    return {_token_id(key): parse_bias(f"{name}[{str(key)[:24]}]", bias) for key, bias in items.items()}


def _token_id(key: Any) -> Any:
    """A key of a JSON object, as a number if it is numeric."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


_PARSERS: dict[str, Parser] = {
    "max_tokens": _number(int, 0),
    "min_tokens": _number(int, 0),
    "temperature": _number(float, 0.0),
    "top_k": _number(int, -1),
    "top_p": _number(float, 0.0, 1.0),
    "min_p": _number(float, 0.0, 1.0),
    "repetition_penalty": _number(float, 0.0, is_open=True),
    "presence_penalty": _number(float, -2.0, 2.0),
    "frequency_penalty": _number(float, -2.0, 2.0),
    "logit_bias": _logit_bias,
    "seed": _number(int, -(1 << 63), (1 << 63) - 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "logprobs": _number(int, -1),
    "prompt_logprobs": _number(int, -1),
    "allowed_token_ids": _allowed_token_ids,
    "logprob_token_ids": partial(_token_ids, most=MAX_LOGPROB_TOKEN_IDS),
    "include_stop_str_in_output": _boolean,
    "skip_special_tokens": _boolean,
    "cache_salt": _cache_salt,
    "lora_name": _text,
    "add_special_tokens": _boolean,
    "truncate_prompt_tokens": _truncation,
    "truncation_side": _one_of("left", "right"),
    "suffix": _suffix,
    "spaces_between_special_tokens": _boolean,
    "bad_words": _bad_words,
    "priority": _number(int, -(1 << 31), (1 << 31) - 1),
    "n": _number(int, 1, MAX_CHOICES),
    "best_of": _number(int, 1, MAX_CHOICES),
}
_READ_TOGETHER = frozenset((*constraints.FIELDS, *REASONING_FIELDS))
"""Parameters read by structured_outputs/."""
_OF_PROMPT = ("add_special_tokens", "suffix", "truncate_prompt_tokens", "truncation_side")
"""Parameters read by requests/prompts.py."""
_READ_ELSEWHERE = _READ_TOGETHER.union(_OF_PROMPT, IGNORED_REQUEST_PARAMETERS)
ACCEPTED = tuple(sorted((*_PARSERS, *_READ_TOGETHER)))
_OUTSIDE_SAMPLING = GenerationParams.__dataclass_fields__.keys() & _PARSERS.keys()
"""Parameters that are not fields of SamplingParams."""


def parse_sampling_parameter(name: str, value: Any) -> Any:
    """The value of one parameter; None for null. Raises TritonError like `parse_sampling_parameters`."""
    if name in NOT_SUPPORTED:
        raise unsupported(f"sampling parameter '{name}' is not supported by this backend")
    parser = _PARSERS.get(name)
    if parser is None:
        raise invalid_argument(f"unknown sampling parameter {shown(name)}, expected one of: {', '.join(ACCEPTED)}")
    try:
        return None if value is None else parser(name, value)
    except TritonError as error:
        error.param = name
        raise


def parse_sampling_parameters(
    values: Mapping[str, Any],
    *,
    remaining_tokens: int,
    vocab_size: int,
    logprobs_needed: bool = False,
    max_logprobs: int = 20,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
) -> GenerationParams:
    """Checks `values` and builds the parameters of one request.

    remaining_tokens: how many tokens fit after the prompt; max_tokens is reduced to it
    vocab_size: upper bound of token ids
    logprobs_needed: whether an output needs the sampled token's logprob even without the parameter
    max_logprobs: maximum number of logprobs per position
    defaults: the model's own, for parameters that are missing or null

    Without a default, a max_tokens of null means remaining_tokens. Without a seed, or with vLLM's -1, one is drawn.

    Raises TritonError INVALID_ARG for an invalid value or an unknown name, UNSUPPORTED for one of NOT_SUPPORTED.
    """
    check_at_most("the request", len(values), MAX_PARAMETERS, "sampling parameters")
    fields = {
        name: parse_sampling_parameter(name, value) for name, value in values.items() if name not in _READ_ELSEWHERE
    }
    constraint, reasoning = constraints.read(values), read_reasoning(values)
    max_tokens = wanted_max_tokens(fields, defaults)
    max_tokens = remaining_tokens if max_tokens is None else min(max_tokens, remaining_tokens)
    chosen = {**defaults, **{name: value for name, value in fields.items() if value is not None}}
    chosen.pop("max_tokens", None)
    if chosen.get("top_p") == 0.0:  # greedy
        chosen |= {"temperature": 0.0, "top_p": 1.0}
    _check_min_tokens(chosen, values.get("min_tokens"), max_tokens, remaining_tokens)
    _check_vocabulary(chosen, vocab_size)
    _check_logprobs(chosen, vocab_size, max_logprobs)
    _check_choices(chosen)
    needs_logprobs = logprobs_needed or chosen["best_of"] > chosen["n"] or bool(chosen.get("logprob_token_ids"))
    seed = chosen.pop("seed", -1)
    logprobs = chosen.pop("logprobs", 0 if needs_logprobs else None)
    top_k = chosen.pop("top_k", 0)
    others = {name: chosen.pop(name) for name in _OUTSIDE_SAMPLING if name in chosen}
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=random.getrandbits(63) if seed == -1 else seed & SEED_MASK,
        logprobs=logprobs,
        top_k=min(max(top_k, 0), vocab_size),  # a larger value has no effect, and might not fit the engine's integers
        **chosen,
    )
    return GenerationParams(sampling=sampling, constraint=constraint, reasoning=reasoning, **others)


def wanted_max_tokens(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> int | None:
    """max_tokens as the request or the model's defaults say; None: as many as fit."""
    given = values.get("max_tokens", defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
    max_tokens: int | None = parse_sampling_parameter("max_tokens", given)
    return defaults.get("max_tokens") if max_tokens is None else max_tokens


def _check_min_tokens(chosen: Mapping[str, Any], given: Any, max_tokens: int, remaining_tokens: int) -> None:
    if chosen.get("min_tokens", 0) > max_tokens:
        fits = f"the {remaining_tokens} tokens that fit after the prompt"
        limit = f"max_tokens ({max_tokens})" if max_tokens < remaining_tokens else fits
        raise _refuse("min_tokens", given, f"at most {limit}")


def _check_logprobs(chosen: dict[str, Any], vocab_size: int, most: int) -> None:
    """Replaces -1, which means the whole vocabulary."""
    for name in ("logprobs", "prompt_logprobs"):
        if (count := chosen.get(name)) is not None:
            chosen[name] = vocab_size if count < 0 else count
            if chosen[name] > most:
                raise _refuse(name, count, f"an integer from 0 to {most} (engine argument 'max_logprobs')")


def _check_choices(chosen: dict[str, Any]) -> None:
    """Fills in `n` and `best_of`."""
    chosen["n"] = chosen.get("n", 1)
    chosen["best_of"] = chosen.get("best_of", chosen["n"])
    if chosen["best_of"] < chosen["n"]:
        raise _refuse("best_of", chosen["best_of"], f"at least n ({chosen['n']})")


def _check_vocabulary(chosen: dict[str, Any], vocab_size: int) -> None:
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
        wrong = [key for key in chosen.get(name, ()) if not (isinstance(key, int) and 0 <= key < vocab_size)]
        if wrong:
            raise invalid_argument(
                f"{_named(name)} names {shown_keys(wrong)}, expected token ids from 0 to {vocab_size - 1}",
                param=name,
            )


AUTO, VLLM_DEFAULTS = "auto", "vllm"
"""Values of the engine argument `generation_config` other than a folder: read the checkpoint's file, or none."""
_PARAMETER_OF = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Field of generation_config.json → sampling parameter. Other fields (do_sample, beams) are not read, as in vLLM."""


def read_sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """A model's sampling defaults by parameter, from generation_config.json and override_generation_config.

    An invalid value in the checkpoint's file is skipped with a warning. Raises TritonError INVALID_ARG naming the
    engine argument for an invalid value from the operator. End-of-sequence tokens are read by the engine.
    """
    defaults: dict[str, Any] = {}
    for field, value in _file_of(config).items():
        try:
            defaults |= _default(field, value)
        except TritonError as error:
            logger.warning("%s of '%s': '%s' is not used: %s", GENERATION_CONFIG_FILE, config.model, field, error)
    for field, value in (config.override_generation_config or {}).items():
        what = f"engine argument 'override_generation_config': '{field}'"
        if field not in _PARAMETER_OF:
            raise invalid_argument(f"{what} is not supported, expected one of: {', '.join(_PARAMETER_OF)}")
        try:
            defaults |= _default(field, value)
        except TritonError as error:
            raise invalid_argument(f"{what} is {shown(value)}: {error}") from None
    if defaults:
        logger.info("'%s': the sampling parameters of requests default to %s", config.model, defaults)
    return defaults


def _default(field: str, value: Any) -> dict[str, Any]:
    name = _PARAMETER_OF.get(field)
    return {} if name is None or value is None else {name: parse_sampling_parameter(name, value)}


def _file_of(config: EngineConfig) -> Mapping[str, Any]:
    source = config.generation_config
    if source == VLLM_DEFAULTS or (source == AUTO and config.model == "mock"):
        return {}
    try:
        if source == AUTO:
            return read_json(_checkpoint_of(config) / GENERATION_CONFIG_FILE)
        path = Path(source) / GENERATION_CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"expected '{AUTO}', '{VLLM_DEFAULTS}' or a folder with a {GENERATION_CONFIG_FILE}")
        return read_json(path)
    except (ValueError, OSError) as error:
        raise invalid_argument(f"engine argument 'generation_config' is '{source}': {error}") from error


def _checkpoint_of(config: EngineConfig) -> Path:
    """The model's directory. For a hub id, this is a load's first access to the hub. Raises TritonError INVALID_ARG."""
    try:
        return local_directory(config.model, config.engine_python)
    except (ValueError, OSError) as error:
        what = "which is not a local directory, and the hub did not return its files"
        raise invalid_argument(f"engine argument 'model' is '{config.model}', {what}: {error}") from error
