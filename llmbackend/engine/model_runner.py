"""Runs one step of a `transformers` model: flattened ragged batch in, sampled tokens out.

For: the engine core, as its `Runner`. Does not know: why these rows were chosen, text, clients. Invariants: a request
costs work per step only inside tensor operations (batches are built with numpy, without a loop over rows); the KV of a
step's tokens is written before it is read; `execute` changes nothing but KV slots, so it can be repeated.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from . import cpu_memory
from .attention.interface import active_context
from .attention.kv_cache import LayerKVCache
from .attention.ragged_batch import RaggedBatch
from .attention.reference import PagedAttention
from .config import EngineConfig
from .infer_request import InferRequest, ModelInfo
from .loader import LoadedModel, load_model
from .sampler import Sampler
from .step import RowTable, SampledTokens, StepPlan

Int64Array = npt.NDArray[np.int64]


class ModelRunner:
    def __init__(self, config: EngineConfig) -> None:
        """Loads the model and allocates the KV memory. Raises ValueError or OSError with a text for the user."""
        start_s = time.monotonic()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config)
        if loaded.device.type == "cpu" and config.transport == "process":
            cpu_memory.keep_freed_memory()
        self._model = loaded.model
        self._device = loaded.device
        self._block_size = config.block_size
        num_blocks = _num_blocks(config, loaded)
        self._caches = {
            layer: LayerKVCache(shape, num_blocks, config.block_size, loaded.dtype, loaded.device)
            for layer, shape in loaded.layer_shapes.items()
        }
        self._sampler = Sampler(config.max_num_seqs, loaded.vocab_size, loaded.eos_token_ids)
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
            description=_describe(loaded),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def add_row(self, row: int, request: InferRequest) -> None:
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        step = _flatten(plan, table)
        batch = RaggedBatch(
            step.query_lens, step.seq_lens, table.block_table[step.rows], step.slots, self._block_size, self._device
        )
        with active_context(PagedAttention(self._caches, batch)):
            logits = self._forward(step)
        if logits is None:
            return SampledTokens(np.empty(0, np.int32))
        return self._sampler.sample(*plan.samples(table), logits, table)

    def close(self) -> None:
        self._caches.clear()
        self._model = None
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _forward(self, step: _FlatStep) -> torch.Tensor | None:
        """Logits [sampled rows, vocab] in the model's dtype; None when no row samples (the output head is skipped)."""
        inputs = {
            "input_ids": self._to_device(step.token_ids)[None],
            "position_ids": self._to_device(step.positions)[None],
            "use_cache": False,
        }
        if not len(step.sampled_tokens):
            self._model.base_model(**inputs)
            return None
        output = self._model(**inputs, logits_to_keep=self._to_device(step.sampled_tokens))
        logits: torch.Tensor = output.logits[0]
        return logits

    def _to_device(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(frozen=True, slots=True)
class _FlatStep:
    """A plan's rows, reordered for attention, and their tokens one after the other.

    rows, query_lens, seq_lens int64 [n]; token_ids, positions, slots int64 [tokens]; sampled_tokens: where in the
    flattened batch the tokens are that samples follow, in the order of `plan.samples`.
    """

    rows: Int64Array
    query_lens: Int64Array
    seq_lens: Int64Array
    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    sampled_tokens: Int64Array


def _flatten(plan: StepPlan, table: RowTable) -> _FlatStep:
    counts = plan.num_scheduled_tokens.astype(np.int64)
    lens = table.num_computed_tokens[plan.rows] + counts
    order = np.lexsort((lens, counts))
    rows, counts, lens = plan.rows[order].astype(np.int64), counts[order], lens[order]
    ends = np.cumsum(counts)
    token_rows = np.repeat(rows, counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - lens, counts)
    last_tokens = np.empty_like(ends)
    last_tokens[order] = ends - 1
    blocks = table.block_table[token_rows, positions // table.block_size].astype(np.int64)
    return _FlatStep(
        rows=rows,
        query_lens=counts,
        seq_lens=lens,
        token_ids=table.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slots=blocks * table.block_size + positions % table.block_size,
        sampled_tokens=_with_drafts(plan, last_tokens[plan.sample_rows]),
    )


def _with_drafts(plan: StepPlan, last_tokens: Int64Array) -> Int64Array:
    """From where each sampled row's chunk ends to where its known tokens end and to all of its drafts."""
    if plan.num_draft_tokens is None:
        return last_tokens
    counts = plan.num_draft_tokens[plan.sample_rows].astype(np.int64) + 1
    ends = np.cumsum(counts)
    tokens: Int64Array = np.arange(ends[-1]) + np.repeat(last_tokens + 1 - ends, counts)
    return tokens


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * sum(shape.bytes_per_token(loaded.dtype) for shape in loaded.layer_shapes.values())
    num_blocks = config.kv_cache_memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"engine argument 'kv_cache_memory_bytes' is {config.kv_cache_memory_bytes}, "
            f"expected at least {block_bytes}, the size of one block of {config.block_size} tokens"
        )
    # More than every row at full length can never be used.
    return min(num_blocks, config.max_num_seqs * -(-loaded.max_model_len // config.block_size))


def _describe(loaded: LoadedModel) -> str:
    dtype = str(loaded.dtype).removeprefix("torch.")
    if loaded.device.type == "cpu":
        return f"cpu, {dtype}, {cpu_memory.describe()}, {loaded.linear_kind} linear layers"
    return f"{torch.cuda.get_device_name(loaded.device)}, {dtype}"
