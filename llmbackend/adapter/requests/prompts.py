"""Turns a request's text, conversation or token ids into the prompt tokens for the engine.

Used by request conversion. Independent of the engine. Invariants: a prompt contains only tokens of the vocabulary; a
text or conversation that certainly has too many tokens is refused before it is tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy.typing as npt

from llmbackend.core.backend_api import TritonError, invalid_argument

from ..limits import ModelLimits
from ..schemas.sampling import NO_DEFAULTS, parse_sampling_parameter, wanted_max_tokens
from ..schemas.schema import LlmInputs, Prompt
from ..text.chat import MAX_VALUES, PromptBounds, read_chat
from ..text.tokenizer import ModelTokenizer, TooManyTokensError

MAX_DESCRIBED_TOKENS: Final = 1 << 20
MAX_DESCRIBED_CHARS: Final = 4 << 20
"""Limits of a prompt that is only described and need not fit into the context. Tokenising this many characters takes a
conversion thread one to two seconds."""

MAX_RESERVED_TOKENS: Final = 4096
"""Limit of the part of the context that is left free after a prompt that is cut, if nothing limits the output."""


def _beyond_context(bounds: PromptBounds) -> PromptBounds:
    """The bounds of a prompt that is only described, or truncated to fit."""
    return replace(
        bounds,
        below_tokens=max(bounds.below_tokens, MAX_DESCRIBED_TOKENS + 1),
        max_chars=max(bounds.max_chars, MAX_DESCRIBED_CHARS),
        max_messages=max(bounds.max_messages, MAX_VALUES),
        why="longer texts are not tokenised",
    )


def _suffix_refused(reason: str) -> TritonError:
    return invalid_argument(f"'suffix' is not supported: {reason}", param="suffix")


class PromptBuilder:
    """Read-only, hence thread-safe."""

    def __init__(
        self, tokenizer: ModelTokenizer, limits: ModelLimits, sampling_defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._sampling_defaults = sampling_defaults
        most = limits.max_tokens
        why = f"this model's maximum context length is {most} tokens"
        forms = limits.max_messages_bytes, limits.trusts_request_templates
        self._in_context = PromptBounds(most, most * tokenizer.max_token_chars, most, why, *forms)
        self._beyond_context = _beyond_context(self._in_context)
        self._fim = fim_encoder(tokenizer, limits.vocab_size)

    def make(self, inputs: LlmInputs) -> Prompt:
        """The prompt of a generation: not empty, with space for a token after it. Raises TritonError INVALID_ARG."""
        suffix = parse_sampling_parameter("suffix", inputs.sampling.get("suffix"))
        adds, keep = self._params(inputs.sampling)
        if suffix:
            prompt = self._fim_prompt(inputs, suffix, adds, keep)
        else:
            prompt = self._prompt(inputs, adds, keep, self._in_context if keep is None else self._beyond_context)
            if inputs.input_ids is None and not prompt.text:  # the tokenizer may have added special tokens
                prompt = Prompt("", ())
        self._check_length(len(prompt.token_ids))
        return prompt

    def describe(self, inputs: LlmInputs) -> Prompt:
        """The prompt, which may be empty or longer than the context. Raises TritonError INVALID_ARG."""
        adds, keep = self._params(inputs.sampling)
        return self._prompt(inputs, adds, keep, self._beyond_context)

    def _params(self, values: Mapping[str, Any]) -> tuple[bool | None, slice | None]:
        """add_special_tokens, and how many prompt tokens are kept; None = all."""
        adds, keep, side = (
            parse_sampling_parameter(name, values.get(name))
            for name in ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
        )
        longest = self._limits.max_tokens - 1
        if keep is not None and keep > longest:
            raise invalid_argument(
                f"sampling parameter 'truncate_prompt_tokens' is {keep}, expected at most {longest}: the model's "
                f"context of {longest + 1} tokens must leave room for one more",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(longest + 1 - max(self._reserved_tokens(values), 1), 1)
            keep = min(keep, self._limits.max_prompt_tokens or keep)
        if keep is None:
            return adds, None
        return adds, slice(keep) if side == "right" else slice(-keep, None)

    def _reserved_tokens(self, values: Mapping[str, Any]) -> int:
        """How many tokens must fit after a prompt that is cut."""
        wanted = wanted_max_tokens(values, self._sampling_defaults)
        if wanted is None:
            wanted = min(self._limits.max_tokens // 4, MAX_RESERVED_TOKENS)
        return min(wanted, self._limits.max_output_tokens or wanted)

    def _prompt(self, inputs: LlmInputs, adds: bool | None, keep: slice | None, bounds: PromptBounds) -> Prompt:
        try:
            if inputs.text_input is not None:
                return self._tokenised(inputs.text_input, adds is not False, keep, bounds)
            if inputs.messages is not None:
                rendered = self._render(inputs.messages, inputs.parsed_messages, bounds)
                return self._tokenised(rendered, bool(adds), keep, bounds)
            assert inputs.input_ids is not None
            ids = self._checked_ids(inputs.input_ids if keep is None else inputs.input_ids[keep], bounds)
            return Prompt(self._tokenizer.decode(ids) if inputs.options.prepend_prompt else "", ids)
        except TritonError:
            raise
        except Exception as error:
            raise invalid_argument(f"the prompt cannot be tokenised: {error}") from error

    def _fim_prompt(self, inputs: LlmInputs, suffix: str, adds: bool | None, keep: slice | None) -> Prompt:
        if self._fim is None:
            raise _suffix_refused("the model's tokenizer has no known fill-in-the-middle tokens")
        if inputs.text_input is None:
            raise _suffix_refused("it requires a text prompt")
        if keep is not None:
            raise _suffix_refused("'truncate_prompt_tokens' would cut off the markers of its prompt")
        _check_chars(len(inputs.text_input) + len(suffix), self._in_context)
        below = self._limits.max_tokens
        try:
            ids = self._fim.encode(inputs.text_input, suffix, add_special_tokens=adds is not False, below=below)
        except TooManyTokensError as error:
            self._check_length(error.num_tokens)
            raise
        return Prompt(inputs.text_input, ids)

    def _tokenised(self, text: str, add_special_tokens: bool, keep: slice | None, bounds: PromptBounds) -> Prompt:
        """If it is cut, its text is that of the tokens that are kept."""
        _check_chars(len(text), bounds)
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, below=bounds.below_tokens)
            kept = tuple(ids if keep is None else ids[keep])
            is_cut = len(kept) < len(ids)
            return Prompt(self._tokenizer.decode(kept, skip_special_tokens=False) if is_cut else text, kept)
        except TooManyTokensError as error:
            self._check_below(error.num_tokens, bounds)
            raise

    def _render(self, text: bytes, value: Any, bounds: PromptBounds) -> str:
        chat = read_chat(text, bounds, value)
        options = {**self._limits.template_options, **chat.options}
        return chat.prompt_of(self._tokenizer.render_chat(chat.for_template, chat.tools, options, chat.template))

    def _checked_ids(self, ids: npt.NDArray[Any], bounds: PromptBounds) -> tuple[int, ...]:
        """Checks the array before creating a Python object for each id."""
        self._check_below(ids.size, bounds)
        size = self._limits.vocab_size
        bad = ids[(ids < 0) | (ids >= size)]
        if bad.size:
            raise invalid_argument(f"input 'input_ids' holds {bad[0]}, expected token ids from 0 to {size - 1}")
        return tuple(ids.tolist())

    def _check_length(self, num_tokens: int) -> None:
        if not num_tokens:
            raise invalid_argument("the prompt is empty, expected at least one token")
        self._check_below(num_tokens, self._in_context)
        limit = self._limits.max_prompt_tokens
        if limit and num_tokens > limit:
            raise invalid_argument(f"the prompt has {num_tokens} tokens, expected at most {limit} (max_prompt_tokens)")

    def _check_below(self, num_tokens: int, bounds: PromptBounds) -> None:
        if num_tokens < bounds.below_tokens:
            return
        room = ", with room for at least one more" if bounds is self._in_context else ""
        raise invalid_argument(
            f"the prompt has {num_tokens} tokens, expected at most {bounds.below_tokens - 1}: {bounds.why}{room}"
        )


def _check_chars(count: int, bounds: PromptBounds) -> None:
    if count > bounds.max_chars:
        raise invalid_argument(f"the prompt has {count} characters, expected at most {bounds.max_chars}: {bounds.why}")


_PROBE: Final = "☺"
"""A character that SentencePiece does not merge with the following one."""


@dataclass(frozen=True, slots=True)
class FimForm:
    """Marker texts, each of which is a single token."""

    before_prefix: str
    before_suffix: str
    middle: str = ""
    """At the end. "" = none: the suffix comes first, and the prompt ends with the prefix."""
    strips_space: bool = False
    """Whether the suffix is tokenised without the space that SentencePiece prepends to texts."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.before_prefix, self.before_suffix, self.middle)))


# Sources: the model cards of Qwen2.5-Coder, StarCoder, SantaCoder, DeepSeek-Coder, CodeGemma; CodeLlama's
# generation.py; mistral-common's encode_fim.
FORMS: Final = (
    FimForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    FimForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    FimForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FimForm("▁<PRE>", "▁<SUF>", "▁<MID>", strips_space=True),  # CodeLlama
    FimForm("[PREFIX]", "[SUFFIX]", strips_space=True),  # Codestral
)


class FimEncoder:
    """Fill-in-the-middle prompts: the texts before and after a gap, in the form with which the model was trained.

    Both texts are tokenised like any prompt; only the markers are added. What the tokenizer appends to a prompt is left
    out, because the text is generated there. Read-only, hence thread-safe.
    """

    def __init__(self, tokenizer: ModelTokenizer, form: FimForm, marker_ids: tuple[int, ...]) -> None:
        """marker_ids: the ids of `form.markers`."""
        self._tokenizer = tokenizer
        self._form = form
        self._marker_ids = marker_ids

    def encode(self, prefix: str, suffix: str, *, add_special_tokens: bool, below: int) -> tuple[int, ...]:
        """The prompt's token ids. Raises TooManyTokensError if there are `below` or more."""
        before_prefix, before_suffix, *middle = self._marker_ids
        ahead, behind = (before_prefix, *self._ids(prefix, below)), (before_suffix, *self._suffix_ids(suffix, below))
        parts = (*ahead, *behind) if middle else (*behind, *ahead)
        ids = (*(self._begin() if add_special_tokens else ()), *parts, *middle)
        if len(ids) >= below:
            raise TooManyTokensError(len(ids))
        return ids

    def _ids(self, text: str, below: int | None = None) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, below=below) if text else []

    def _suffix_ids(self, text: str, below: int) -> list[int]:
        if not self._form.strips_space:
            return self._ids(text, below)
        probe = self._ids(_PROBE)
        return self._ids(_PROBE + text, below + len(probe))[len(probe) :]

    def _begin(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        bare = self._ids(_PROBE)
        whole = self._tokenizer.encode(_PROBE, add_special_tokens=True)
        starts = range(len(whole) - len(bare) + 1)
        return next((whole[:start] for start in starts if whole[start : start + len(bare)] == bare), [])


def fim_encoder(tokenizer: ModelTokenizer, vocab_size: int) -> FimEncoder | None:
    """An encoder for the first form whose markers are all tokens of the model; None if there is none."""
    for form in FORMS:
        ids = [tokenizer.token_id(marker) for marker in form.markers]
        known = tuple(token_id for token_id in ids if token_id is not None and token_id < vocab_size)
        if len(known) == len(ids):
            return FimEncoder(tokenizer, form, known)
    return None
