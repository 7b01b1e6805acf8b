"""A step as one native call: the decoder program with its KV memory, proved before it is used.

For: the model runner, on CPU. Does not know: sampling, why these rows were chosen. Invariant: a program that is used
gave the probes' logits as the model's own modules give them.
"""

from __future__ import annotations

import numpy as np
import torch

from llmbackend.engine.compatibility import CheckedModel
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.decoder_description import UnrecognisedError
from llmbackend.engine.flat_step import FlatStep, flatten
from llmbackend.engine.loader import LoadedModel
from llmbackend.engine.step import Int32Array, RowTable, StepPlan

from .decoder_program import DecoderProgram
from .native_kv_cache import native_caches

_LONGEST_PROBE = 8


class ProgramForward:
    def __init__(self, config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> None:
        """Raises UnrecognisedError when this model must run as modules."""
        if loaded.engine is None or loaded.decoder is None:
            raise UnrecognisedError(loaded.why_modules)
        caches = native_caches(loaded.engine, loaded.layer_shapes, num_blocks, config.block_size, loaded.dtype)
        if caches is None:
            raise UnrecognisedError("its heads or its KV blocks do not fit the native layout")
        drafts = config.speculative_config.max_step_tokens if config.speculative_config else 0
        max_tokens = max(config.max_num_batched_tokens, drafts, _LONGEST_PROBE)
        max_samples = max(min(max_tokens, config.max_num_seqs + drafts), _LONGEST_PROBE)
        self._program = DecoderProgram(loaded.engine, loaded.decoder, caches, max_tokens, max_samples)
        self._prove(loaded.checked)

    def logits(self, plan: StepPlan, table: RowTable) -> torch.Tensor | None:
        """Logits float32 [samples, vocab], valid until the next step; None when no row samples."""
        step = flatten(plan, table)
        logits = self._program.forward(step, step.blocks_in_use(table))
        return torch.from_numpy(logits) if len(logits) else None

    def close(self) -> None:
        pass

    def _prove(self, checked: CheckedModel) -> None:
        """Every probe sequence alone, in the first block."""
        logits = [self._program.forward(_probe(tokens), np.zeros((1, 1), np.int32)).copy() for tokens in
                  (sequence.numpy().astype(np.int32) for sequence in checked.sequences)]  # fmt: skip
        if difference := checked.difference(torch.from_numpy(np.concatenate(logits))):
            raise UnrecognisedError(f"the program's logits differ from the modules' {difference}")


def _probe(token_ids: Int32Array) -> FlatStep:
    """A step that computes one sequence from its start in block 0, and samples at every token."""
    length = np.array([len(token_ids)], np.int32)
    places = np.arange(len(token_ids), dtype=np.int32)
    return FlatStep(
        rows=np.zeros(1, np.int32),
        query_lens=length,
        seq_lens=length,
        query_start=np.array([0, len(token_ids)], np.int32),
        token_ids=token_ids,
        positions=places,
        slots=places,
        sampled_tokens=places,
    )
