"""The messages between an engine and whoever feeds it: requests in, outputs of a step out.

For: every thread and process border of the engine. Does not know: text, tensors, clients. Invariant: all are frozen and
self-contained, so that a request plus the tokens sent so far is enough to go on in another engine process.
Names are vLLM's.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .load_progress import LoadProgress

FinishReason = Literal["stop", "length", "abort", "error"]
PrefixSalt = tuple[str, str, str]
"""Tenant, LoRA adapter, the client's salt. Not joined: no separator is one that a client could not write."""


BANNED_BIAS: Final = -1e9
"""The bias of a token that may not be sampled: no logit makes up for it, and products with a penalty stay finite."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Defaults leave the model's distribution as it is.

    temperature 0 is greedy. top_k 0 = off. `seed` is always set by the caller: the draw of the token at position p
    depends on (seed, p) alone. `logprobs` None = none, n = the sampled token's and the n most likely ones'. Logprobs
    are those of the raw distribution (before penalties and temperature), as vLLM's default. max_tokens is cut to what
    max_model_len leaves after the prompt. bad_words: sequences of two or more tokens that may not be completed, also
    where they begin in the prompt; a single token is banned by its bias.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


class InferRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. `request_id` is unique in its engine.

    `output_token_ids` are tokens already generated (and sent) by an engine that died: generation goes on after them.
    `tenant` (which the host sets), `cache_salt` (which the client may set) and `lora_name` (the adapter to use, "" =
    none): only requests with the same three share what the prefix cache holds.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    lora_name: str = ""

    @property
    def prefix_salt(self) -> PrefixSalt:
        """Whose computed prefixes it may share: an adapter changes keys and values."""
        return self.tenant, self.lora_name, self.cache_salt


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one output position. `top`: (token id, logprob), most likely first; `rank` from 1 on."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one request.

    token_ids: the new tokens, the end-of-sequence or stop token included when there is one. logprobs: one per new
    token, or empty. stop_token_id: the token that ended the request, when finish_reason is "stop". A request whose
    finish_reason is set is over: its KV blocks are free and no more outputs follow. num_cached_tokens: how many of the
    prompt's tokens were not computed, because the prefix cache had them. error: a message for its client, with
    finish_reason "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step; counters count since the engine started.

    num_free_blocks: those that the prefix cache keeps for nobody in particular are among them. prefix_cache_queries and
    prefix_cache_hits: tokens of the requests that were admitted, and how many of them needed no computing.
    num_host_blocks: KV blocks in host memory, of which num_cached_host_blocks hold a text; num_offloaded_blocks and
    num_reloaded_blocks count what was copied there and back.
    num_drafts: speculations of one row in one step; num_draft_tokens: their tokens; num_accepted_tokens: those that
    held. last_step_s: the last step as a whole, where steps overlap from the end of the one before it; last_forward_s
    and last_sample_s: its two computing parts.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    last_step_s: float = 0.0
    last_forward_s: float = 0.0
    last_sample_s: float = 0.0
    num_invariant_breaches: int = 0
    num_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    num_offloaded_blocks: int = 0
    num_reloaded_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def last_host_s(self) -> float:
        """How much of the last step nothing was computed in: what the host's work held it up."""
        return max(self.last_step_s - self.last_forward_s - self.last_sample_s, 0.0)


class EngineInput(msgspec.Struct, frozen=True, array_like=True):
    """Host → engine: requests to add and ids to abort, one message per wake-up. shutdown ends the engine after it."""

    add: tuple[InferRequest, ...] = ()
    abort: tuple[str, ...] = ()
    shutdown: bool = False


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Engine → host: all outputs of one step in one message."""

    step_id: int
    outputs: tuple[StepOutput, ...]
    stats: EngineStats


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → host, once, when the model is loaded."""

    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    dtype: str
    device: str
    load_s: float
    description: str = ""
    """One line for the log: device, dtype, threads, instruction set."""
    num_host_blocks: int = 0
    """KV blocks in host memory, beside num_blocks."""


class EngineStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → host, the first messages: how far the load has come, any number of times, and then the loaded model, or
    why it cannot be loaded (and then the engine ends). is_shortage: the machine lacked memory, descriptors or
    processes."""

    info: ModelInfo | None = None
    progress: LoadProgress | None = None
    error: str = ""
    is_shortage: bool = False
