"""Runs one step of a `transformers` model: a plan in, sampled tokens out.

For: the engine core, as its `Runner`. Does not know: why these rows were chosen, text, clients. Invariants: a request
costs time per step only inside array operations; `execute` changes KV slots alone, so that it can be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from .config import EngineConfig
from .cpu import cpu_memory
from .cpu.decoder_program import ProgramForward
from .errors import ProgramUnsupportedError
from .infer_request import InferRequest, ModelInfo
from .model.loader import LoadedModel, load_model
from .model.lora import refuse_adapter
from .model.module_forward import ModuleForward
from .sampling.prompt_logprobs import Float32Array, PromptSpan, logprobs_of_spans, prompt_spans
from .sampling.torch_sampling import TorchSampler
from .step import Int32Array, RowTable, Runner, SampledTokens, StepPlan

logger = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 1 << 30


class Forward(Protocol):
    """A loaded model with its KV memory, from tokens to logits."""

    def logits(self, plan: StepPlan, table: RowTable) -> torch.Tensor | None:
        """Computes the plan's tokens and writes their KV; logits [plan.num_samples, vocab] or None when that is 0."""

    def logits_behind(self, row: int, positions: Int32Array) -> torch.Tensor:
        """Logits [positions, vocab] behind these tokens of a row of the last step; valid until the next call. At most
        PIECE_TOKENS positions."""

    def close(self) -> None:
        """Frees memory. Nothing is called after it."""


def make_model_runner(config: EngineConfig) -> Runner:
    """The model on its device. Raises ValueError, OSError or torch.OutOfMemoryError with a text for the user."""
    start_s = time.monotonic()
    if not config.device.startswith("cuda"):
        return ModelRunner(config)
    loaded = load_model(config)
    from .gpu.start import start_on_cuda

    try:
        return start_on_cuda(config, loaded, start_s)
    except ProgramUnsupportedError as reason:
        logger.warning("%s runs as transformers modules, one step after the other: %s", loaded.model_type, reason)
    return ModelRunner(config, loaded)


class ModelRunner:
    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        """Allocates the KV memory. loaded: None = loads the model. Raises ValueError or OSError with a text for the
        user."""
        start_s = time.monotonic()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        loaded = loaded or load_model(config)
        if config.kv_cache_dtype != "auto":
            raise ValueError(
                f"engine argument 'kv_cache_dtype' is '{config.kv_cache_dtype}', expected 'auto': only the accelerator "
                "path keeps keys and values in 8 bits"
            )
        if loaded.device.type == "cpu" and config.transport == "process":
            cpu_memory.keep_freed_memory()
        self._device = loaded.device
        num_blocks = _num_blocks(config, loaded)
        self.adapters = loaded.adapters
        self._forward, how = _make_forward(config, loaded, num_blocks)
        self._sampler = TorchSampler(config.max_num_seqs, loaded.vocab_size, loaded.eos_token_ids, loaded.kernels)
        self._info = ModelInfo(
            model_type=loaded.model_type,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            block_size=config.block_size,
            num_blocks=num_blocks,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            load_s=time.monotonic() - start_s,
            description=_describe(loaded, how),
            needs_torch=True,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def add_row(self, row: int, request: InferRequest) -> None:
        if self.adapters is not None:
            self.adapters.batch.set_row(row, request.lora_name)
        else:
            refuse_adapter(request.lora_name)
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        start_s = time.perf_counter()
        logits = self._forward.logits(plan, table)
        forward_s = time.perf_counter() - start_s
        sampled = SampledTokens(np.empty(0, np.int32))
        masks = None if plan.masks is None else plan.masks.result()
        with torch.inference_mode():
            if logits is not None:
                sampled = self._sampler.sample(*plan.samples(table), logits, table, masks)
            if spans := prompt_spans(plan, table):
                sampled = self._with_prompt_logprobs(sampled, spans, table)
        sample_s = time.perf_counter() - start_s - forward_s
        return dataclasses.replace(sampled, forward_s=forward_s, sample_s=sample_s)

    def _with_prompt_logprobs(
        self, sampled: SampledTokens, spans: Sequence[PromptSpan], table: RowTable
    ) -> SampledTokens:
        def logits_of(row: int, positions: Int32Array) -> Float32Array:
            logits = self._forward.logits_behind(row, positions)[:, : self._info.vocab_size]
            array: Float32Array = logits.float().cpu().numpy()
            return array

        prompt_logprobs, errors = logprobs_of_spans(spans, table, logits_of)
        return dataclasses.replace(sampled, prompt_logprobs=prompt_logprobs, errors={**sampled.errors, **errors})

    def close(self) -> None:
        self._forward.close()
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def _make_forward(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> tuple[Forward, str]:
    """What computes this model, and its name for the log."""
    try:
        return ProgramForward(config, loaded, num_blocks), "one native program"
    except ProgramUnsupportedError as reason:
        logger.info("%s runs as transformers modules: %s", loaded.model_type, reason)
        return ModuleForward(loaded, num_blocks, config.block_size), "modules"


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * sum(shape.bytes_per_token(loaded.dtype) for shape in loaded.layer_shapes.values())
    memory_bytes = config.kv_cache_memory_bytes or _DEFAULT_KV_BYTES
    num_blocks = memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"engine argument 'kv_cache_memory_bytes' is {memory_bytes}, "
            f"expected at least {block_bytes}, the size of one block of {config.block_size} tokens"
        )
    # More than all rows at full length need is never used.
    return min(num_blocks, config.max_num_seqs * -(-loaded.max_model_len // config.block_size))


def _describe(loaded: LoadedModel, how: str) -> str:
    dtype = str(loaded.dtype).removeprefix("torch.")
    if loaded.device.type == "cpu":
        return f"cpu, {dtype}, {cpu_memory.describe()}, {loaded.linear_kind} linear layers, {how}"
    return f"{torch.cuda.get_device_name(loaded.device)}, {dtype}"
