"""A step through a model's own transformers modules, with our paged attention under them.

For: the model runner: any model on a GPU, and on CPU those that no program computes. Does not know: sampling, why these
rows were chosen. Invariant: the KV of a step's tokens is written before it is read.
"""

from __future__ import annotations

import numpy as np
import torch

from .attention.interface import active_context
from .attention.kv_cache import LayerKVCache
from .attention.ragged_batch import RaggedBatch
from .attention.reference import PagedAttention
from .flat_step import FlatStep, flatten
from .loader import LoadedModel
from .step import Int32Array, RowTable, StepPlan


class ModuleForward:
    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._block_size = block_size
        self._caches = {
            layer: LayerKVCache(shape, num_blocks, block_size, loaded.dtype, loaded.device)
            for layer, shape in loaded.layer_shapes.items()
        }

    @torch.inference_mode()
    def logits(self, plan: StepPlan, table: RowTable) -> torch.Tensor | None:
        """Logits [samples, vocab] in the model's dtype; None when no row samples (the output head is skipped)."""
        step = flatten(plan, table, _by_length(plan, table))
        batch = RaggedBatch(
            step.query_lens.astype(np.int64),
            step.seq_lens.astype(np.int64),
            table.block_table[step.rows],
            step.slots.astype(np.int64),
            self._block_size,
            self._device,
        )
        with active_context(PagedAttention(self._caches, batch)):
            return self._run(step)

    def close(self) -> None:
        self._caches.clear()
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

    def _to_device(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _by_length(plan: StepPlan, table: RowTable) -> Int32Array:
    """Rows of equal query length become neighbours, sorted by context, as RaggedBatch wants them."""
    counts = plan.num_scheduled_tokens
    order: Int32Array = np.lexsort((table.num_computed_tokens[plan.rows] + counts, counts)).astype(np.int32)
    return order
