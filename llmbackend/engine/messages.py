"""The messages between an engine and the host: requests in, outputs of a step out.

For: every thread and process boundary of the engine. Does not know: text, tensors, clients. Invariant: all are frozen
and self-contained, so that a request and the tokens sent so far are enough to continue it in another engine process.
Names are vLLM's.
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

    stored       hashes of blocks that are found from now on, 8 bytes each
    removed      hashes of blocks that are not found any more
    is_snapshot  whether `stored` is all that is found, and what was known before is void
    """

    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False


EventName = Literal["compile", "compiled", "prefill", "recompute", "preempted"]


class RequestEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event of a traced request.

    request_id
    name        compile, compiled: its grammar; prefill: a chunk of its prompt; recompute: tokens that were computed
                before a preemption, or by an engine that died; preempted: it lost its blocks
    time_ns     monotonic, the same for all processes of a machine
    num_tokens  of the chunk
    """

    request_id: str
    name: EventName
    time_ns: int
    num_tokens: int = 0


FinishReason = Literal["stop", "length", "abort", "error"]
PrefixSalt = tuple[str, str, str]
"""Tenant, LoRA adapter, the client's salt. Not joined to one string: a client could write any separator."""


BANNED_BIAS: Final = -1e9
"""The bias of a token that must not be sampled: larger than any logit, and finite also when a penalty multiplies it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. Defaults leave the model's distribution as it is.

    max_tokens          of the output; cut to what max_model_len leaves after the prompt; 0 = the prompt is computed
    min_tokens          of the output, before which no stop token is sampled
    temperature         0 = greedy
    top_k               0 = off
    top_p               1 = off
    min_p               0 = off
    repetition_penalty  1 = off
    presence_penalty    0 = off
    frequency_penalty   0 = off
    logit_bias          by token id; BANNED_BIAS = never
    seed                always set by the caller: the draw of the token at position p depends on (seed, p) alone
    stop_token_ids      end the request, beside the model's end-of-sequence tokens
    ignore_eos          whether end-of-sequence tokens are like any other
    logprobs            None = none, n = the sampled token's and the n most likely ones', of the raw distribution
                        (before penalties and temperature), as vLLM's default
    logprob_token_ids   further tokens whose logprobs are given at each position; only with logprobs
    prompt_logprobs     as logprobs, for the prompt's tokens except the first; -1 = of the whole vocabulary
    bad_words           sequences of two or more tokens that must not be completed, also where they begin in the prompt
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
    """What part of an output is reasoning: its tokens up to and including the end sequence. All of it follows from the
    tokens alone.

    start_token_ids  where the prompt does not end inside reasoning, there is reasoning only if the output begins with
                     these; () = there is none then
    end_token_ids    the end sequence, at least one token
    max_tokens       of reasoning, the start sequence not counted; then the end sequence is forced; None = no limit
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
    output_token_ids  generated (and sent) by an engine that died: generation continues after them
    num_prompt_logprobs  tokens of the prompt whose logprobs that engine sent
    sampling          how to choose tokens
    priority          smaller is earlier
    tenant            set by the host
    cache_salt        set by the client, "" = none
    lora_name         the adapter, "" = none
    grammar           which texts may be generated, in llguidance's form: the JSON of its TopLevelGrammar, or Lark; it
                      holds from the first token on, or from the one behind the reasoning; "" = all
    reasoning         None = the output has none, as far as the engine is concerned
    prefix_group      requests of one group share their prompt's KV also where prefix caching is off; "" = none
    is_traced         whether the engine tells what its steps do with the request
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
    grammar: str = ""
    reasoning: Reasoning | None = None
    prefix_group: str = ""
    is_traced: bool = False

    @property
    def prefix_salt(self) -> PrefixSalt:
        """Requests with an equal one may share computed prefixes: an adapter changes keys and values."""
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
    finish_reason      None = more outputs follow; else the request's KV blocks are free
    stop_token_id      the token that ended it, with finish_reason "stop"
    logprobs           one for each new token, or empty
    num_cached_tokens  tokens of the prompt that the prefix cache had
    error              for its client, with finish_reason "error"
    prompt_logprobs    of the next tokens of the prompt, the first of all is at position 1; there may be no new tokens
    is_bad_input       whether the error lies in the request's own fields
    num_draft_tokens   guesses of the step's tokens; all new tokens but the last are accepted ones, if there are any
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

    num_requests_running      requests
    num_requests_waiting      requests
    num_blocks                KV blocks of the device
    num_free_blocks           of them, free or cached without a request that uses them
    num_preemptions         + requests
    prompt_tokens           + tokens
    generation_tokens       + tokens
    num_drafts              + speculations of one row in one step
    num_draft_tokens        + their tokens
    num_accepted_tokens     + of them, those that the model sampled as well
    num_steps               + steps
    last_step_s               seconds of the last step; where steps overlap, since the end of the one before
    last_forward_s            of them, computing logits
    last_sample_s             of them, sampling
    num_invariant_breaches  + self-checks that failed
    num_host_blocks           KV blocks in host memory
    num_cached_host_blocks    of them, those that hold a text
    num_offloaded_blocks    + blocks copied to host memory
    num_reloaded_blocks     + blocks copied back
    prefix_cache_queries    + tokens of requests that were admitted
    prefix_cache_hits       + of them, those that the prefix cache had
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
        """Seconds of the last step in which nothing was computed, because the host was at work."""
        return max(self.last_step_s - self.last_forward_s - self.last_sample_s, 0.0)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's tokens stand for: one of these two, from which grammars are matched.

    tokenizer_json  the text of a Hugging Face tokenizer.json
    token_bytes     by token id, where each byte is a token and others have no text
    """

    tokenizer_json: str = ""
    token_bytes: tuple[bytes, ...] = ()


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that requests may name. An engine never has two of one name."""

    name: str
    path: str
    """A folder that PEFT wrote."""


class AdapterResult(msgspec.Struct, frozen=True, array_like=True):
    """How loading an adapter ended. error: "" = requests may name it."""

    name: str
    error: str = ""


class EngineInput(msgspec.Struct, frozen=True, array_like=True):
    """Host → engine, one message per wake-up.

    add         requests
    abort       request ids
    shutdown    whether the engine ends after this message
    vocabulary  before or with the first request with a grammar, at most once for each engine
    load        adapters, before the requests that name them
    drop        names of adapters that no further request will have
    watch       what to report from now on; None = as before
    prefixes    whether results report changes of the prefix cache from now on; true also asks for a snapshot; None = as
                before
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
    adapters of loads that have ended since the last one
    events   of traced requests since the last one
    report   None unless someone watches
    blocks   of the prefix cache; None = no change, or no host asked for them
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
    vocab_size       tokens
    max_model_len    tokens of a request
    eos_token_ids    end-of-sequence tokens
    block_size       tokens of a KV block
    num_blocks       KV blocks of the device
    dtype            of weights and activations
    device           "cpu", "cuda:0" …
    load_s           seconds that the load took; of a process, from its order on
    description      for the log: device, dtype, threads, instruction set
    paths            for the log: which way parts of the model are computed, and why
    parts            for the log: what the load consisted of
    num_host_blocks  KV blocks in host memory, beside num_blocks
    weight_bytes     packed weights that every step reads; 0 = not known
    kv_bytes_per_token  0 = not known
    held_weight_bytes   all weights in the device's memory; 0 = not known
    kv_bytes            memory of the device's KV blocks; 0 = not known
    device_bytes        memory that the engine's process has of an accelerator; 0 on CPU
    needs_torch      whether torch computes, so that the next engine's process needs it, too
    kv_groups        which layers share a block, and for how long a request keeps it
    state_bytes      of one sequence, in recurrent layers; 0 = there are none
    num_state_slots  states that there is room for: of sequences that run, and of prefixes
    path             what computes: "native" (one program on a CPU), "modules" (those of transformers), "gpu" (one
                     program) or "mock"
    path_reason      why modules compute; "" = they do not
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
        """Tokens of the longest request that the KV memory has room for, at most max_model_len."""
        return min(self.max_model_len, self.kv_groups.most_tokens(self.block_size, self.num_blocks))

    @property
    def summary(self) -> str:
        """For the log: how the model is computed, why so, and what its start consisted of."""
        took = f"loaded in {self.load_s:.2f} s" + (f" ({text_of(self.parts)})" if self.parts else "")
        return "; ".join(text for text in (self.description, *self.paths, took) if text)


class ModelPrepared(msgspec.Struct, frozen=True):
    """Engine → host, in place of a ModelInfo: the process has packed the model for later engines, and ends. The next
    engine can be started at once.

    paths  for the log, as a ModelInfo has them
    parts  of the load, as a ModelInfo has them
    """

    paths: tuple[str, ...] = ()
    parts: tuple[StartPart, ...] = ()


class EngineStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → host, the first messages: any number with `progress`, and then one of the others.

    info         the loaded model
    prepared     in its place: the model is packed, and the process ends
    progress     how far the load has come
    error        why the model cannot be loaded; the engine ends
    is_shortage  whether the machine lacked memory, descriptors or processes
    """

    info: ModelInfo | None = None
    prepared: ModelPrepared | None = None
    progress: LoadProgress | None = None
    error: str = ""
    is_shortage: bool = False


def stop_token_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an output: the model's end-of-sequence tokens, unless they are ignored, and the request's."""
    return frozenset((*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids))


def own_stop_token_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The request's own among them: an end-of-sequence token is the model's also where the request names it (as in
    vLLM)."""
    return frozenset(sampling.stop_token_ids).difference(() if sampling.ignore_eos else eos_token_ids)


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """Its user decides whether numbers of tokens include the prompt."""

    stop_token_ids: frozenset[int]
    min_tokens: int
    """A stop token does not end the output up to this number of tokens."""
    max_tokens: int
    """This number of tokens ends the output."""

    def finish_reason(self, last_token_id: int, num_tokens: int) -> FinishReason | None:
        """Why `num_tokens` tokens with this last one are the whole output, if they are."""
        if last_token_id in self.stop_token_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None
