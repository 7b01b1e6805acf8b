"""llama.cpp through its C interface: continuous batching over many sequences, greedy argmax on the returned logits.

llama.cpp's own server batches in the same way, but is slower; this is the engine alone. Options are llama.cpp's, and so
are their defaults.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drivers import llama_cpp_bindings
from benchmarks.recording import Recorder, drive
from benchmarks.workloads import Request

BATCH_TOKENS, MICRO_BATCH_TOKENS, MAX_SEQUENCES = 2048, 512, 64
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
"""Numbers of llama_flash_attn_type."""


@dataclass
class Sequence:
    request: int
    position: int
    pending: list[int]
    """Tokens that are not computed yet: the rest of the prompt, or the last sampled token."""
    produced: int = 0


class LlamaCpp:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._lib = lib = llama_cpp_bindings.load()
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = not arguments.no_repack
        if arguments.no_mmap:
            parameters.load_mode = lib.LLAMA_LOAD_MODE_NONE
        self._model = lib.llama_model_load_from_file(arguments.model.encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {arguments.model}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._threads = arguments.threads
        self._flash_attention = FLASH_ATTENTION[arguments.flash_attention]
        self.description = f"llama.cpp, {Path(arguments.model).stem.rpartition('-')[2]}"

    def run(self, recorder: Recorder) -> dict[str, Any]:
        shared = _shared_prefix(recorder)
        context = self._context(recorder)
        batch = self._lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            recorder.start()
            if shared:
                self._share(context, batch, recorder.requests[0].prompt[:shared], len(recorder.requests))
            self._generate(context, batch, recorder, shared)
            return recorder.stop()
        finally:
            self._lib.llama_batch_free(batch)
            self._lib.llama_free(context)

    def _context(self, recorder: Recorder) -> Any:
        """One KV pool for all sequences if they share a prefix; otherwise a separate part for each, which is faster."""
        shared = _shared_prefix(recorder)
        lengths = [len(request.prompt) + request.output_tokens + 8 - shared for request in recorder.requests]
        sequences = min(MAX_SEQUENCES, len(lengths))
        cells = shared + sum(lengths) if shared else -(-max(lengths) // 256) * 256 * sequences
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx = -(-cells // 256) * 256
        parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = BATCH_TOKENS, MICRO_BATCH_TOKENS, sequences
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = bool(shared)
        parameters.flash_attn_type = self._flash_attention
        parameters.no_perf = True
        context = self._lib.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def _share(self, context: Any, batch: Any, prefix: list[int], sequences: int) -> None:
        """Computes a prefix once and copies it to all sequences."""
        self._fill(batch, [(0, position, token) for position, token in enumerate(prefix)])
        self._decode(context, batch)
        memory = self._lib.llama_get_memory(context)
        for sequence in range(1, min(MAX_SEQUENCES, sequences)):
            self._lib.llama_memory_seq_cp(memory, 0, sequence, 0, len(prefix))

    def _generate(self, context: Any, batch: Any, recorder: Recorder, shared: int) -> None:
        memory = self._lib.llama_get_memory(context)
        waiting = list(range(len(recorder.requests)))[::-1]
        free = list(range(min(MAX_SEQUENCES, len(waiting))))[::-1]
        running: dict[int, Sequence] = {}
        while waiting or running:
            while waiting and free:
                index = waiting.pop()
                running[free.pop()] = Sequence(index, shared, recorder.requests[index].prompt[shared:])
            for sequence_id, row in self._step(context, batch, running):
                sequence = running[sequence_id]
                sequence.pending = [self._argmax(context, row)]
                sequence.produced += 1
                recorder.tokens(sequence.request)
                if sequence.produced == recorder.requests[sequence.request].output_tokens:
                    self._lib.llama_memory_seq_rm(memory, sequence_id, -1, -1)
                    del running[sequence_id]
                    free.append(sequence_id)

    def _step(self, context: Any, batch: Any, running: dict[int, Sequence]) -> list[tuple[int, int]]:
        """Decoding sequences first, then prompts up to the budget; (sequence, row of its logits) of those that end."""
        tokens: list[tuple[int, int, int]] = []
        ends: list[tuple[int, int]] = []
        for sequence_id, sequence in sorted(running.items(), key=lambda item: not item[1].produced):
            chunk = sequence.pending[: BATCH_TOKENS - len(tokens)]
            tokens += [(sequence_id, sequence.position + i, token) for i, token in enumerate(chunk)]
            sequence.position += len(chunk)
            sequence.pending = sequence.pending[len(chunk) :]
            if chunk and not sequence.pending:
                ends.append((sequence_id, len(tokens) - 1))
        self._fill(batch, tokens)
        for _, row in ends:
            batch.logits[row] = 1
        self._decode(context, batch)
        return ends

    @staticmethod
    def _fill(batch: Any, tokens: list[tuple[int, int, int]]) -> None:
        batch.n_tokens = len(tokens)
        for i, (sequence_id, position, token) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence_id

    def _decode(self, context: Any, batch: Any) -> None:
        if code := self._lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with code {code}")

    def each_logits(self, text: list[int]) -> Iterator[Any]:
        """float32 [vocab] behind each of the text's tokens, valid until the next one."""
        context = self._context(Recorder([Request(text, 1)]))
        batch = self._lib.llama_batch_init(len(text), 0, 1)
        try:
            self._fill(batch, [(0, position, token) for position, token in enumerate(text)])
            for row in range(len(text)):
                batch.logits[row] = 1
            self._decode(context, batch)
            for row in range(len(text)):
                yield self._logits(context, row)
        finally:
            self._lib.llama_batch_free(batch)
            self._lib.llama_free(context)

    def _argmax(self, context: Any, row: int) -> int:
        return int(self._logits(context, row).argmax())

    def _logits(self, context: Any, row: int) -> Any:
        import numpy as np

        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, row), shape=(self._vocab_size,))


def _shared_prefix(recorder: Recorder) -> int:
    """How many first tokens all prompts have in common."""
    prompts = [request.prompt for request in recorder.requests]
    if len(prompts) == 1:
        return 0
    return next((i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1), 0)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--flash-attention", choices=FLASH_ATTENTION, default="auto")
    parser.add_argument("--no-repack", action="store_true", help="multiply weights as they lie in the file")
    parser.add_argument("--no-mmap", action="store_true")


if __name__ == "__main__":
    own = argparse.ArgumentParser(description=__doc__)
    add_options(own)
    drive(LlamaCpp, own)
