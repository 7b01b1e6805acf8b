"""The engine's arguments: one frozen, validated message.

Used by everything that starts an engine, wherever the values come from. Field names are those of vLLM's EngineArgs if
it has the argument, so a model.json written for vllm_backend works. Invariant: every existing config is valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from llmbackend.links.addresses import is_loopback

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5557"
MAX_PORT: Final = 65535
AUTO_CONTEXT: Final = -1
"""A max_model_len, vLLM's `auto`: the model's limit, or less if the KV memory holds less."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine publishes its KV block events, for external routers (llm-d, Dynamo). Raises
    ValueError naming field, value and what was expected.

    enable_kv_cache_events  whether events are published
    publisher               "zmq", or "null" = events are discarded
    endpoint                tcp:// with a loopback address and a port, always bound here; vLLM connects to an address
                            without "*" instead of binding it
    replay_endpoint         the same, for subscribers that ask for missed batches; None = no replay
    buffer_steps            batches of events kept for replay
    hwm                     batches queued for one subscriber before further ones are dropped
    max_queue_size          accepted without effect: `hwm` bounds the queue
    topic                   the topic of all batches
    data_parallel_rank      added to both ports and sent with each batch; the index of the instance among those of its
                            model
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"'{name}' is {getattr(self, name)}, expected at least 1")
        if not 0 <= self.data_parallel_rank < MAX_PORT:
            raise ValueError(f"'data_parallel_rank' is {self.data_parallel_rank}, expected 0 to {MAX_PORT - 1}")
        self._own(self.endpoint, "endpoint")
        if self.replay_endpoint is not None:
            self._own(self.replay_endpoint, "replay_endpoint")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def own_endpoint(self) -> str:
        return self._own(self.endpoint, "endpoint")

    @property
    def own_replay_endpoint(self) -> str | None:
        return None if self.replay_endpoint is None else self._own(self.replay_endpoint, "replay_endpoint")

    def _own(self, endpoint: str, name: str) -> str:
        try:
            parts = urlsplit(endpoint)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise self._wrong(endpoint, name) from None
        is_whole = endpoint == f"{parts.scheme}://{parts.netloc}" and "@" not in endpoint
        if parts.scheme != "tcp" or not is_whole or port is None or not is_loopback(host):
            raise self._wrong(endpoint, name)
        own_port = port + self.data_parallel_rank
        if not 0 < own_port <= MAX_PORT:
            raise ValueError(
                f"'{name}' is '{endpoint}', expected a port from 1 to {MAX_PORT - self.data_parallel_rank}"
            )
        host = "127.0.0.1" if host == "localhost" else host
        return f"tcp://[{host}]:{own_port}" if ":" in host else f"tcp://{host}:{own_port}"

    @staticmethod
    def _wrong(endpoint: str, name: str) -> ValueError:
        return ValueError(
            f"'{name}' is '{endpoint}', expected tcp:// with a loopback address and a port ({DEFAULT_ENDPOINT}): "
            "events contain prompt tokens in plain text, and must not leave this machine"
        )


DEFAULT_LOOKUP = 3
GPU_DEFAULTS: Final[Mapping[str, int]] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
"""vLLM's defaults on a GPU, for the caller that makes the config of an engine there."""


HOST_FIELDS: Final = frozenset(
    {
        *("generation_config", "override_generation_config", "chat_template", "tool_call_parser", "reasoning_parser"),
        *("chat_template_content_format", "default_chat_template_kwargs", "trust_request_chat_template"),
        *("skip_tokenizer_init", "max_logprobs"),
    }
)
"""Arguments that only the model's host uses. Models that differ only in these share fork servers and engines."""


MAX_FORCED_STEP_TOKENS = 64
"""Grammar-forced drafts for which every step has room, over all rows; one with free rows has room for more. Runners
reserve memory for their logits."""


SPECULATIVE_STEP_TOKENS, SPECULATIVE_STEP_TOKENS_ON_GPU = 8, 64
"""Default size in tokens of the largest step that may contain speculative drafts. A GPU multiplies about a hundred rows
in the time it takes to read the weights, but attention reads the keys once per draft."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """N-gram speculation (prompt lookup), with vLLM's names. Raises ValueError naming field, value and what was
    expected.

    method                    only "ngram"
    num_speculative_tokens    maximum number of drafts per row and step; 4
    prompt_lookup_max         longest n-gram at the end of a row's text to look up in that text; None = the same as
                              prompt_lookup_min, or 3
    prompt_lookup_min         shortest such n-gram; None = the same as prompt_lookup_max, or 3
    max_step_tokens           size of the largest step that may have drafts, these included; None = 8 on CPU, 64 on GPU.
                              Small steps are bound by reading the weights, so further tokens are nearly free; devices
                              with more compute can afford larger values
    """

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    max_step_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "max_step_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"'{name}' is {value}, expected at least 1")
        if self.lookup_min > self.lookup_max:
            raise ValueError(
                f"'prompt_lookup_min' is {self.lookup_min}, expected at most {self.lookup_max}, the prompt_lookup_max"
            )

    @property
    def lookup_max(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def lookup_min(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP


class StructuredOutputsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Structured output, with vLLM's names. Raises ValueError naming field, value and what was expected.

    backend                        "auto" or "guidance", both llguidance
    disable_fallback               accepted without effect: there is one backend and no fallback
    disable_any_whitespace         whether JSON is generated without whitespace
    disable_additional_properties  whether object schemas forbid additional properties by default
    enable_in_reasoning            only false: a grammar applies after the reasoning
    disable_jump_forward           SGLang's name: whether grammar-forced tokens are computed one per step instead of
                                   several; the output is the same
    """

    backend: Literal["auto", "guidance"] = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    disable_jump_forward: bool = False

    def __post_init__(self) -> None:
        if self.enable_in_reasoning:
            raise ValueError("'enable_in_reasoning' is true, expected false: a grammar applies after the reasoning")


_AT_LEAST_ONE: Final = (
    *("tensor_parallel_size", "pipeline_parallel_size", "block_size", "max_num_seqs", "max_num_batched_tokens"),
    *("max_engine_failures", "max_loras", "max_lora_rank"),
)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises ValueError naming field, value and what was expected. Units are in the names; defaults follow below.
    Fields marked (host) are used only by the host (see HOST_FIELDS).

    The model:
    model                         directory of a Hugging Face checkpoint, hub id, or "mock" (logits from a hash)
    tokenizer                     directory or hub id; "" = the model's
    skip_tokenizer_init           whether requests and responses are token ids, without a tokenizer (host)
    generation_config             source of sampling defaults: "auto" = the model's generation_config.json, "vllm" =
                                  none, else a directory that contains one (host)
    override_generation_config    sampling defaults that override generation_config (host)
    chat_template                 Jinja template, or a file with one; "" = the model's (host)
    tool_call_parser              format of tool calls, by vLLM's names; "" = detected from the template (host)
    reasoning_parser              the same for reasoning (host)
    chat_template_content_format  message content passed to the template: "string" and "auto" = its text,
                                  "openai" = a list of parts (host)
    default_chat_template_kwargs  template variables, unless the request sets them (host)
    trust_request_chat_template   whether a request may bring its own template (host)
    max_logprobs                  maximum top logprobs per position in a request; -1 = no limit (host)
    dtype                         of weights and activations; "auto" = the checkpoint's
    max_model_len                 tokens of prompt and output; None = the model's limit; or AUTO_CONTEXT
    trust_remote_code             whether code from the checkpoint may run
    load_format                   "safetensors", or "dummy" = random weights
    weight_cache_dir              folder of packed weights, read by later starts on CPU; "" = the environment
                                  variable LLMBACKEND_WEIGHT_CACHE_DIR, else llmbackend/weights in $XDG_CACHE_HOME
    weight_cache_size             its limit in GiB; 0 = no cache; None = $LLMBACKEND_WEIGHT_CACHE_SIZE, else 32
    quantization                  8-bit weights (per channel) and activations (per token): "int8" integers or
                                  "fp8" floats (e4m3, on a GPU); "int4": 4-bit weights, the output head in 8 bits,
                                  or all as stored in a GGUF file, with int8 activations (on a CPU); None = none
    enable_lora                   whether requests may name adapters
    lora_modules                  adapters: name -> directory in PEFT's format
    max_loras                     adapters resident on a GPU at a time, at least those of lora_modules
    max_cpu_loras                 adapters resident on a CPU; others are loaded on demand; None = all
    max_lora_rank                 largest rank of an adapter

    Device and process:
    device                        "cpu", "cuda", "cuda:1" …
    tensor_parallel_size          ranks among which every layer is sharded
    pipeline_parallel_size        stages that the layers are split into, of tensor_parallel_size ranks each. Every rank
                                  has its own device; on one machine, consecutive ones starting at `device`
    transport                     "process" = a separate process, "inline" = a thread of the host
    engine_python                 interpreter of the engine's process; "" = the host's
    num_threads                   CPU threads; 0 = one per usable CPU, one fewer with eight or more (cpu_threads.py)
    cluster_resources             resources that a rank needs in a cluster, by Ray's names, in place of those that
                                  num_threads and device imply: {"CPU": 4, "accelerator_type:H100": 0.001}; ignored
                                  outside a cluster (and by the engine itself)
    enforce_eager                 CPU: run the model's modules, not the native program; GPU: no CUDA graphs
    kernels                       "torch" = plain torch in place of all custom kernels
    cudagraph_capture_sizes       step sizes in tokens to capture CUDA graphs for; None = see gpu/graphs.py
    batch_invariant               whether matrix products on a GPU sum in an order independent of the batch

    KV memory:
    block_size                    tokens per KV block
    num_kv_blocks                 blocks, each of one layer group; None = as many as fit kv_cache_memory_bytes
    kv_cache_memory_bytes         None = on a CPU 1 GiB, or more for one request of a given max_model_len; on a GPU
                                  what weights, the largest step and graphs leave
    kv_cache_dtype                "fp8" = 8-bit keys and values, on a GPU; "auto" = dtype
    gpu_memory_utilization        fraction of the GPU's memory to use, above 0 and up to 1
    kv_offloading_size            GiB of host memory for KV blocks evicted from a GPU; None = none
    num_host_kv_blocks            the same as a number of blocks; overrides kv_offloading_size
    enable_prefix_caching         whether requests share computed prefixes
    kv_events_config              where changes of the prefix cache are published; None = not published

    Scheduling:
    max_num_seqs                  maximum number of running requests
    max_num_batched_tokens        token budget of a step
    step_target_ms                target duration of steps with both prefill and decode; None = on CPU 2.4 times a
                                  decode-only step, longer in a burst, on other devices no limit; 0 = no limit
    long_prefill_token_threshold  tokens; longer prompts leave half of the step budget to shorter ones; 0 =
                                  max_num_batched_tokens
    seed                          of the random weights of load_format "dummy"
    speculative_config            None = no speculation
    structured_outputs_config     see StructuredOutputsConfig
    async_scheduling              whether the next step is launched before the last one's tokens are read; None = if
                                  the runner supports it

    Failures:
    step_timeout_s                an engine is replaced if a step takes longer
    load_timeout_s                an engine is replaced if its load takes longer
    idle_unload_s                 an engine idle for this long is stopped, and restarted by the next request; 0 =
                                  never
    max_engine_failures           engines lost in a row without finishing a step, after which requests are refused
    fault_directory               see llmbackend/testing/faults.py; "" = no faults

    The mock:
    mock_vocab_size               vocabulary size in tokens
    mock_step_ms                  minimum duration of a step
    mock_steps_in_flight          steps in flight on its device (a thread); 0 = it computes synchronously
    """

    model: str
    tokenizer: str = ""
    skip_tokenizer_init: bool = False
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | None = None
    chat_template: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: dict[str, Any] = {}
    trust_request_chat_template: bool = False
    max_logprobs: int = 20
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    block_size: int = 32
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    gpu_memory_utilization: float = 0.9
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    batch_invariant: bool = False
    kv_offloading_size: float | None = None
    num_host_kv_blocks: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    step_target_ms: float | None = None
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    kv_events_config: KVEventsConfig | None = None
    seed: int = 0
    speculative_config: SpeculativeConfig | None = None
    structured_outputs_config: StructuredOutputsConfig = StructuredOutputsConfig()
    async_scheduling: bool | None = None
    trust_remote_code: bool = False
    transport: Literal["process", "inline"] = "process"
    engine_python: str = ""
    num_threads: int = 0
    cluster_resources: dict[str, float] = {}
    quantization: Literal["int8", "int4", "fp8"] | None = None
    enforce_eager: bool = False
    kernels: Literal["auto", "torch"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    weight_cache_dir: str = ""
    weight_cache_size: float | None = None
    mock_vocab_size: int = 259
    mock_step_ms: float = 0.0
    mock_steps_in_flight: int = 0
    enable_lora: bool = False
    lora_modules: dict[str, str] = {}
    max_loras: int = 8
    max_cpu_loras: int | None = None
    max_lora_rank: int = 16
    step_timeout_s: float = 120.0
    load_timeout_s: float = 1800.0
    idle_unload_s: float = 0.0
    max_engine_failures: int = 5
    fault_directory: str = ""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            self._at_least(name, getattr(self, name), 1)
        for name in ("long_prefill_token_threshold", "num_threads", "mock_steps_in_flight"):
            self._at_least(name, getattr(self, name), 0)
        if self.num_ranks > 1:
            self._check_split()
        self._check_offloading()
        self._check_resources()
        for name in ("step_timeout_s", "load_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"engine argument '{name}' is {getattr(self, name):g}, expected a number above 0")
        for name in ("mock_step_ms", "step_target_ms", "idle_unload_s", "weight_cache_size", "kv_offloading_size"):
            number = getattr(self, name) or 0.0
            if not 0 <= number < math.inf:
                raise ValueError(f"engine argument '{name}' is {number:g}, expected a number of at least 0")
        if self.lora_modules and not self.enable_lora:
            raise ValueError("engine argument 'lora_modules' is set, expected 'enable_lora' to be true")
        if self.quantization == "int4" and self.device.startswith("cuda"):
            raise ValueError("engine argument 'quantization' is 'int4', expected 'int8', 'fp8' or null on a GPU")
        if self.enable_lora and self.quantization is not None and self.device.startswith("cuda"):
            raise ValueError(f"engine argument 'quantization' is '{self.quantization}', expected null with enable_lora")
        for name in ("given_max_model_len", "num_kv_blocks", "kv_cache_memory_bytes", "max_cpu_loras"):
            if (value := getattr(self, name)) is not None:
                self._at_least(name.removeprefix("given_"), value, 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"engine argument 'gpu_memory_utilization' is {self.gpu_memory_utilization:g}, "
                "expected a number above 0 and up to 1"
            )
        if self.kv_events_config is not None and self.kv_events_config.is_on and not self.enable_prefix_caching:
            raise ValueError("engine argument 'kv_events_config' is set, expected 'enable_prefix_caching' to be true")
        if taken := {"messages", "tools", "add_generation_prompt"} & self.default_chat_template_kwargs.keys():
            raise ValueError(
                f"engine argument 'default_chat_template_kwargs' has '{min(taken)}', which is a field of requests"
            )
        for size in self.cudagraph_capture_sizes or ():
            self._at_least("cudagraph_capture_sizes", size, 1)

    @property
    def given_max_model_len(self) -> int | None:
        """None = the model's limit applies."""
        return None if self.max_model_len == AUTO_CONTEXT else self.max_model_len

    @property
    def eight_bits(self) -> Literal["int8", "fp8"] | None:
        """What `quantization` makes of the weights on a GPU."""
        return None if self.quantization == "int4" else self.quantization

    @property
    def num_ranks(self) -> int:
        """Number of processes (ranks) that make up one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def split(self) -> str:
        """The argument that splits the model, with its value, for messages."""
        if self.pipeline_parallel_size > 1:
            return f"engine argument 'pipeline_parallel_size' is {self.pipeline_parallel_size}"
        return f"engine argument 'tensor_parallel_size' is {self.tensor_parallel_size}"

    def _check_resources(self) -> None:
        uses_gpu = self.device.startswith("cuda")
        for name, amount in self.cluster_resources.items():
            what = f"engine argument 'cluster_resources' has {amount:g} of '{name}'"
            if not name or not 0 <= amount < math.inf:
                raise ValueError(f"{what}, expected a resource's name and a number of at least 0")
            if name == "GPU" and self.device != "auto" and (amount > 0) != uses_gpu:
                raise ValueError(f"{what}, expected {'more' if uses_gpu else 'none'} where 'device' is '{self.device}'")
            if name == "GPU" and amount > 1:
                raise ValueError(f"{what}, expected at most 1: each rank has one")

    def _check_split(self) -> None:
        """An engine with several ranks needs a process for each."""
        wrong = {
            "model": self.model == "mock",
            "transport": self.transport != "process",
            "speculative_config": self.speculative_config is not None,
            "enable_lora": self.enable_lora,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                value = getattr(self, name)
                shown = f"'{value}'" if isinstance(value, str) else "set"
                raise ValueError(f"{self.split}, expected 1 if '{name}' is {shown}")

    def of_instance(self, index: int) -> EngineConfig:
        """The config of one engine of a model, without the host's fields and with its own ports for KV events."""
        plain, events = EngineConfig(model=self.model), self.kv_events_config
        if events is not None and index:
            events = msgspec.structs.replace(events, data_parallel_rank=index)
        defaults = {name: getattr(plain, name) for name in HOST_FIELDS}
        return msgspec.structs.replace(self, **defaults, kv_events_config=events)

    @property
    def may_overlap(self) -> bool:
        """Whether a step may be launched before the tokens of the previous one have been read."""
        return self.async_scheduling is not False

    @property
    def may_draft(self) -> bool:
        """Whether steps of an overlapping runner may have drafts. Drafts that only grammars force require each step to
        be read before the next is launched."""
        return self.speculative_config is not None or not self.may_overlap

    @property
    def max_speculative_step_tokens(self) -> int:
        """Size in tokens of the largest step that may contain speculative drafts, these included; 0 without
        speculation."""
        if self.speculative_config is None:
            return 0
        default = SPECULATIVE_STEP_TOKENS_ON_GPU if self.device.startswith("cuda") else SPECULATIVE_STEP_TOKENS
        return min(self.speculative_config.max_step_tokens or default, self.max_num_batched_tokens)

    @property
    def max_step_samples(self) -> int:
        """Maximum number of tokens that a step samples: one per row and one per draft. Speculative drafts have their
        own bound."""
        forced = 0 if self.structured_outputs_config.disable_jump_forward else MAX_FORCED_STEP_TOKENS
        return min(self.max_num_batched_tokens, self.max_num_seqs + max(self.max_speculative_step_tokens, forced))

    @property
    def offloads_kv(self) -> bool:
        """Whether KV blocks move to host memory when the device runs out."""
        return bool(self.kv_offloading_size or self.num_host_kv_blocks)

    def num_host_blocks(self, block_bytes: int) -> int:
        """Number of KV blocks of this size to keep in host memory. Raises ValueError if not even one fits."""
        if self.num_host_kv_blocks is not None or not self.kv_offloading_size:
            return self.num_host_kv_blocks or 0
        num_blocks = int(self.kv_offloading_size * 2**30) // block_bytes
        if num_blocks < 1:
            raise ValueError(
                f"engine argument 'kv_offloading_size' is {self.kv_offloading_size:g}, expected at least "
                f"{block_bytes / 2**30:.3g} GiB, the size of one block of {self.block_size} tokens"
            )
        return num_blocks

    def _check_offloading(self) -> None:
        if self.num_host_kv_blocks is not None:
            self._at_least("num_host_kv_blocks", self.num_host_kv_blocks, 0)
        if not self.offloads_kv:
            return
        name = "kv_offloading_size" if self.kv_offloading_size else "num_host_kv_blocks"
        if not self.enable_prefix_caching:
            raise ValueError(
                f"engine argument '{name}' is set, expected 'enable_prefix_caching' to be true: "
                "blocks are looked up as prefixes"
            )
        if self.num_ranks > 1:
            split = "tensor_parallel_size" if self.pipeline_parallel_size == 1 else "pipeline_parallel_size"
            raise ValueError(f"engine argument '{name}' is set, expected null or 0 if '{split}' is above 1")

    @staticmethod
    def _at_least(name: str, value: int, minimum: int) -> None:
        if value < minimum:
            raise ValueError(f"engine argument '{name}' is {value}, expected at least {minimum}")
