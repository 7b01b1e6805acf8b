"""A step through a model's own transformers modules, with paged attention under them.

For: the model runner, for every model that no program computes. Does not know: sampling, why these rows were chosen.
Invariant: the KV of a step's tokens is written before it is read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from ..attention.interface import AttentionContext, active_context
from ..attention.native import NativePagedAttention, native_kv_memory
from ..attention.reference import LayerKVCache, PagedAttention, RaggedBatch
from ..sampling.prompt_logprobs import Float32Array
from ..step import FlatStep, Int32Array, RowTable, StepPlan, flatten
from .loader import LoadedModel


class _Attention(Protocol):
    def begin(self, plan: StepPlan, table: RowTable) -> tuple[FlatStep, AttentionContext]:
        """The plan as one flat batch, in the order that this attention needs, and the attention of the step."""


class ModuleForward:
    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._loras = None if loaded.adapters is None else loaded.adapters.batch
        self._attention = _make_attention(loaded, num_blocks, block_size)
        self._hidden: object = None
        """What the layers gave for the last step's batch."""
        self._step: FlatStep
        base = self._model.base_model
        self._layers = getattr(base, "decoder", base)
        """What the head's input comes from: with a decoder of its own (OPT) not the base model itself."""
        self._hook = self._layers.register_forward_hook(self._keep_hidden)

    @torch.inference_mode()
    def logits(self, plan: StepPlan, table: RowTable) -> torch.Tensor | None:
        """Logits [samples, vocab] in the model's dtype; None when no row samples (the output head is skipped)."""
        step, context = self._attention.begin(plan, table)
        self._step = step
        if self._loras is not None:
            self._loras.begin(step)
        with active_context(context):
            return self._run(step)

    def close(self) -> None:
        self._hook.remove()
        del self._attention, self._hidden, self._layers
        self._model = None

    def _run(self, step: FlatStep) -> torch.Tensor | None:
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

    @torch.inference_mode()
    def logits_behind(self, row: int, positions: Int32Array) -> Float32Array:
        """The model is called once more, with what its layers gave in the last step in place of its layers."""
        hidden = self._hidden
        self._layers.forward = lambda *args, **kwargs: hidden
        try:
            tokens = self._step.tokens_at(row, positions)
            output = self._model(input_ids=self._to_device(self._step.token_ids)[None], use_cache=False,
                                 logits_to_keep=self._to_device(tokens))  # fmt: skip
        finally:
            del self._layers.forward
        logits: Float32Array = output.logits[0].float().cpu().numpy()
        return logits

    def _keep_hidden(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._hidden = output

    def _to_device(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _make_attention(loaded: LoadedModel, num_blocks: int, block_size: int) -> _Attention:
    """Native attention where every layer fits its layout, else torch's."""
    if loaded.kernels is not None:
        memory = native_kv_memory(loaded.kernels, loaded.layer_shapes, num_blocks, block_size, loaded.dtype)
        if memory is not None:
            return _OnNative(NativePagedAttention(loaded.kernels, loaded.layer_shapes, memory))
    return _OnTorch(loaded, num_blocks, block_size)


class _OnNative:
    def __init__(self, attention: NativePagedAttention) -> None:
        self._attention = attention

    def begin(self, plan: StepPlan, table: RowTable) -> tuple[FlatStep, AttentionContext]:
        step = flatten(plan, table)
        self._attention.begin(step, step.blocks_in_use(table)[0])
        return step, self._attention


class _OnTorch:
    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._device = loaded.device
        self._caches = {
            layer: LayerKVCache(shape, num_blocks, block_size, loaded.dtype, loaded.device)
            for layer, shape in loaded.layer_shapes.items()
        }

    def begin(self, plan: StepPlan, table: RowTable) -> tuple[FlatStep, AttentionContext]:
        step = flatten(plan, table, _by_length(plan, table))
        batch = RaggedBatch(
            step.query_lens.astype(np.int64),
            step.seq_lens.astype(np.int64),
            table.block_table[step.rows],
            step.slots.astype(np.int64),
            table.block_size,
            self._device,
        )
        return step, PagedAttention(self._caches, batch)


def _by_length(plan: StepPlan, table: RowTable) -> Int32Array:
    """Rows of equal query length become neighbours, sorted by context, as RaggedBatch needs them."""
    counts = plan.num_scheduled_tokens
    order: Int32Array = np.lexsort((table.num_computed_tokens[plan.rows] + counts, counts)).astype(np.int32)
    return order
