"""The messages between an engine and its host: requests in, one result per step out.

They cross every thread and process boundary of the engine and contain token ids, never text, tensors or clients.
Invariant: all are frozen and self-contained; a request and the tokens sent so far suffice to continue it in another
engine process. Names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from .kv_groups import KVGroups
from .load_progress import LoadProgress, StartPart, text_of
from .reports import EngineReport, Watch


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes since the last message. A block is in at most one of `stored` and `removed`.

    stored       hashes of blocks added to the cache, 8 bytes each
    removed      hashes of blocks no longer in the cache
    is_snapshot  whether `stored` is the whole cache and replaces earlier messages
    """

    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


EventName = Literal["compile", "compiled", "prefill", "recompute", "preempted"]


class RequestEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event of a traced request.

    request_id
    name        compile, compiled: its grammar; prefill: a chunk of its prompt; recompute: tokens already computed
                before a preemption or by an engine that died; preempted: its blocks were released
    time_ns     monotonic, comparable between processes of one machine
    num_tokens  of the chunk
    """

    request_id: str
    name: EventName
    time_ns: int
    num_tokens: int = 0


FinishReason = Literal["stop", "length", "abort", "error"]
PrefixSalt = tuple[str, str, str]
"""Tenant, LoRA adapter, the client's salt. A tuple, because a client could put any separator into a joined string."""


BANNED_BIAS: Final = -1e9
"""Bias of a token that must not be sampled: outweighs any logit, and stays finite when a penalty multiplies it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample tokens. The defaults leave the model's distribution unchanged.

    max_tokens          output tokens, limited to what max_model_len leaves after the prompt; 0 = prefill only
    min_tokens          output tokens before which no stop token is sampled
    temperature         0 = greedy
    top_k               0 = off
    top_p               1 = off
    min_p               0 = off
    repetition_penalty  1 = off
    presence_penalty    0 = off
    frequency_penalty   0 = off
    logit_bias          by token id; BANNED_BIAS = never
    seed                always set by the caller; the draw for position p depends only on (seed, p)
    stop_token_ids      end the request, in addition to the model's end-of-sequence tokens
    ignore_eos          whether end-of-sequence tokens are treated as ordinary tokens
    logprobs            None = none, n = those of the sampled token and of the n most likely ones, from the raw
                        distribution (before penalties and temperature), as in vLLM by default
    logprob_token_ids   further tokens whose logprobs are returned at each position; requires logprobs
    prompt_logprobs     as logprobs, for all prompt tokens but the first; -1 = of the whole vocabulary
    bad_words           sequences of two or more tokens that must not be completed, even if begun in the prompt
    allowed_token_ids   the only tokens that may be sampled; () = all
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
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which part of an output is reasoning: its tokens up to and including the end sequence. Determined by the tokens
    alone.

    start_token_ids  unless the prompt ends inside reasoning, the output contains reasoning only if it begins with
                     these; () = none
    end_token_ids    the end sequence, at least one token
    max_tokens       of reasoning, without the start sequence; then the end sequence is forced; None = no limit
    is_open          whether the prompt ends inside reasoning
    """

    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...]
    max_tokens: int | None = None
    is_open: bool


class InferRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. Only requests with equal tenant, cache_salt and lora_name share cached prefixes.

    request_id        unique in its engine
    prompt_token_ids  at least one
    output_token_ids  generated and sent by an engine that died; generation continues after them
    num_prompt_logprobs  prompt tokens whose logprobs that engine sent
    sampling          how to sample tokens
    priority          smaller is earlier
    tenant            set by the host
    cache_salt        set by the client, "" = none
    lora_name         the adapter, "" = none
    served_lora_name  the clients' name for it, "" = the same; several loads can have it
    grammar           the allowed outputs, as llguidance's TopLevelGrammar in JSON, or Lark; applies from the first
                      token, or from the one after the reasoning; "" = all
    reasoning         None = the engine does not track reasoning
    prefix_group      requests of one group share the KV of their prompt even without prefix caching; "" = none
    is_traced         whether results contain RequestEvents of this request
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    lora_name: str = ""
    served_lora_name: str = ""
    grammar: str = ""
    reasoning: Reasoning | None = None
    prefix_group: str = ""
    is_traced: bool = False

    @property
    def prefix_salt(self) -> PrefixSalt:
        """Only requests with equal salts may share computed prefixes; an adapter changes keys and values."""
        return self.tenant, self.lora_name, self.cache_salt


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one output position.

    token_id  the sampled token
    logprob   its log probability
    rank      its rank, from 1 on
    top       (token id, logprob), most likely first
    others    (token id, logprob) of logprob_token_ids, in their order
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    others: tuple[tuple[int, float], ...] = ()


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one request.

    request_id
    token_ids          the new tokens, with the end-of-sequence or stop token
    finish_reason      None = more outputs follow; otherwise the request's KV blocks are already free
    stop_token_id      the token that ended the request, with finish_reason "stop"
    logprobs           one for each new token, or empty
    num_cached_tokens  prompt tokens found in the prefix cache
    error              message for the client, with finish_reason "error"
    prompt_logprobs    of the next prompt tokens, starting at position 1; may come without new tokens
    is_bad_input       whether the error was caused by the request's own fields
    num_draft_tokens   speculative drafts in the step; if there are any, all new tokens but the last are accepted ones
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_bad_input: bool = False
    num_draft_tokens: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step; "+" marks counters since the engine started.

    num_requests_running      running requests
    num_requests_waiting      waiting requests, also those whose grammar or adapter is not ready yet
    num_blocks                KV blocks on the device
    num_free_blocks           of them, free or cached but not in use by a request
    num_preemptions         + preempted requests
    prompt_tokens           + prompt tokens
    generation_tokens       + output tokens
    num_drafts              + times that a row had drafts in a step
    num_draft_tokens        + drafts
    num_accepted_tokens     + of them, accepted
    num_steps               + steps
    last_step_s               seconds of the last step; if steps overlap, since the end of the previous one
    last_forward_s            of them, spent on the forward pass
    last_sample_s             of them, spent on sampling
    num_invariant_breaches  + self-checks that failed
    num_host_blocks           KV blocks in host memory
    num_offloaded_blocks    + blocks copied to host memory
    num_reloaded_blocks     + blocks copied back
    prefix_cache_queries    + tokens of admitted requests that were looked up in the prefix cache
    prefix_cache_hits       + of them, found in the prefix cache
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
    num_offloaded_blocks: int = 0
    num_reloaded_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of KV blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def last_host_s(self) -> float:
        """Seconds of the last step in which the device was idle because the host was working."""
        return max(self.last_step_s - self.last_forward_s - self.last_sample_s, 0.0)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The bytes of a model's tokens, for matching grammars: one of the two fields.

    tokenizer_json  the text of a Hugging Face tokenizer.json
    token_bytes     by token id, for vocabularies of bytes; other tokens have no text
    """

    tokenizer_json: str = ""
    token_bytes: tuple[bytes, ...] = ()


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter for requests to name. Names are unique within an engine."""

    name: str
    path: str
    """Folder in PEFT's format."""


class AdapterResult(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of loading an adapter. error: "" = loaded."""

    name: str
    error: str = ""


class EngineInput(msgspec.Struct, frozen=True, array_like=True):
    """Host → engine, one message per wake-up.

    add         new requests
    abort       ids of requests to end
    shutdown    whether the engine ends after this message
    vocabulary  sent once per engine, at the latest with the first request with a grammar
    load        adapters to load, before the requests that name them
    drop        names of adapters that no further request will use
    watch       what to report from now on; None = no change
    prefixes    whether results report changes of the prefix cache from now on; true also requests a snapshot; None =
                no change
    """

    add: tuple[InferRequest, ...] = ()
    abort: tuple[str, ...] = ()
    shutdown: bool = False
    vocabulary: Vocabulary | None = None
    load: tuple[AdapterLoad, ...] = ()
    drop: tuple[str, ...] = ()
    watch: Watch | None = None
    prefixes: bool | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Engine → host, one message per step.

    step_id  counts from 1
    outputs  of all requests that the step advanced or ended
    stats    after the step
    adapters of loads that ended since the last result
    events   of traced requests since the last result
    report   None unless someone is watching
    blocks   changes of the prefix cache; None = none, or not requested
    """

    step_id: int
    outputs: tuple[StepOutput, ...]
    stats: EngineStats
    adapters: tuple[AdapterResult, ...] = ()
    events: tuple[RequestEvent, ...] = ()
    report: EngineReport | None = None
    blocks: BlockChanges | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → host, once, when the model is loaded.

    model_type       transformers' name of the architecture
    vocab_size       vocabulary size in tokens
    max_model_len    limit of a request in tokens
    eos_token_ids    end-of-sequence tokens
    block_size       tokens per KV block
    num_blocks       KV blocks on the device
    dtype            of weights and activations
    device           "cpu", "cuda:0" …
    load_s           seconds that the load took, including the start of the process
    description      for the log: device, dtype, threads, instruction set
    paths            for the log: how parts of the model are computed, and why
    parts            for the log: the phases of the load
    num_host_blocks  KV blocks in host memory, in addition to num_blocks
    weight_bytes     packed weights read by every step; 0 = unknown
    kv_bytes_per_token  0 = unknown
    held_weight_bytes   all weights in the device's memory; 0 = unknown
    kv_bytes            memory of the device's KV blocks; 0 = unknown
    device_bytes        accelerator memory used by the engine's process; 0 on CPU
    needs_torch      whether the model is computed by torch, so that the next engine's process needs it too
    kv_groups        which layers share a block, and for how long a request keeps it
    state_bytes      recurrent state of one sequence; 0 = no recurrent layers
    num_state_slots  slots for recurrent states, of running sequences and of cached prefixes
    path             how the model runs: "native" (one program on a CPU), "modules" (those of transformers), "gpu"
                     (one program) or "mock"
    path_reason      why it runs as modules; "" = it does not
    """

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
    paths: tuple[str, ...] = ()
    parts: tuple[StartPart, ...] = ()
    num_host_blocks: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    held_weight_bytes: int = 0
    kv_bytes: int = 0
    device_bytes: int = 0
    needs_torch: bool = False
    kv_groups: KVGroups = KVGroups()
    state_bytes: int = 0
    num_state_slots: int = 0
    path: str = ""
    path_reason: str = ""

    @property
    def max_request_tokens(self) -> int:
        """Length in tokens of the longest request that fits the KV memory, at most max_model_len."""
        return min(self.max_model_len, self.kv_groups.max_request_tokens(self.block_size, self.num_blocks))

    @property
    def summary(self) -> str:
        """For the log: how the model is computed, why, and what the start consisted of."""
        took = f"loaded in {self.load_s:.2f} s" + (f" ({text_of(self.parts)})" if self.parts else "")
        return "; ".join(text for text in (self.description, *self.paths, took) if text)


class ModelPrepared(msgspec.Struct, frozen=True):
    """Engine → host, instead of a ModelInfo: the process has packed the model for later engines, and exits. The next
    engine can be started at once.

    paths  for the log, as in ModelInfo
    parts  for the log, as in ModelInfo
    """

    paths: tuple[str, ...] = ()
    parts: tuple[StartPart, ...] = ()


class EngineStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → host, the first messages: any number with `progress`, then one with another field.

    info         the loaded model
    prepared     instead: the model is packed, and the process exits
    progress     of the load
    error        why the model cannot be loaded; the engine exits
    is_shortage  whether the machine ran out of memory, descriptors or processes
    """

    info: ModelInfo | None = None
    prepared: ModelPrepared | None = None
    progress: LoadProgress | None = None
    error: str = ""
    is_shortage: bool = False


def stop_token_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Tokens that end an output: the request's own, and the model's end-of-sequence tokens unless they are ignored."""
    return frozenset((*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids))


def own_stop_token_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The request's own stop tokens. An end-of-sequence token that the request names still counts as the model's (as in
    vLLM)."""
    return frozenset(sampling.stop_token_ids).difference(() if sampling.ignore_eos else eos_token_ids)


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """When an output ends. Whether counts include the prompt is up to the caller."""

    stop_token_ids: frozenset[int]
    min_tokens: int
    """Stop tokens do not end outputs of up to this many tokens."""
    max_tokens: int
    """The output ends at this many tokens."""

    def finish_reason(self, last_token_id: int, num_tokens: int) -> FinishReason | None:
        """Why an output of `num_tokens` tokens with this last one is complete; None = it is not."""
        if last_token_id in self.stop_token_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None
