"""Runs the steps of a packed model: one native program, and nothing else of the model but its packed weights.

The engine core's `Runner` whenever a CPU can run the model as a program; `why_modules` says when engine arguments rule
that out. Independent of torch, checkpoints, and the source of the memories. Invariant: the same packed model computes
the same bits in any process, whether just packed or read from a file.
"""

from __future__ import annotations

import time

from ..adapter_loads import refuse_adapter
from ..config import EngineConfig, SpeculativeConfig
from ..cpu_threads import engine_threads
from ..errors import ProgramUnsupportedError
from ..kernels.library import NativeKernels, load
from ..load_progress import note
from ..messages import InferRequest, ModelInfo
from ..sampling.native_sampling import NativeSampling
from ..sampling.rows import SamplingRows
from ..sampling.sampler import PIECE_TOKENS, HostSteps, Sampler
from ..step import FlatStep, Int32Array, RowTable, SampledTokens, StepPlan, flatten
from .decoder_program import DecoderProgram, Float32Array
from .lora import NativeAdapters, ProgramAdapters
from .native_memory import BLOCK_MULTIPLE, FilePages, num_kv_blocks
from .packed_decoder import PackedDecoder, PackedModel
from .recurrent_operations import StepStates
from .recurrent_states import SlotContents, flatten_from, groups_with_draft_replay, num_state_slots, part_of_row


def why_modules(config: EngineConfig) -> str:
    """Why the engine arguments rule out a native program; "" = they do not."""
    reasons = {
        "it is the mock model": config.model == "mock",
        f"device is '{config.device}'": config.device != "cpu",
        f"the model is split over {config.num_ranks} ranks": config.num_ranks != 1,
        "kernels is 'torch'": config.kernels == "torch",
        "enforce_eager is set": config.enforce_eager,
        f"block_size is {config.block_size}, not a multiple of {BLOCK_MULTIPLE}": config.block_size % BLOCK_MULTIPLE
        != 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def why_no_adapters(config: EngineConfig, decoder: PackedDecoder) -> str:
    """Why this program does not support the enabled adapters; "" = it does, or none are enabled."""
    if not config.enable_lora or not decoder.unadapted:
        return ""
    return f"LoRA adapters may change '{decoder.unadapted}', which native programs compute without adapters"


class NativeRunner:
    def __init__(self, config: EngineConfig, packed: PackedModel) -> None:
        """Makes the program and the KV memory. Raises ProgramUnsupportedError if the config asks for modules,
        ValueError or OSError with a message for the user, or MemoryError."""
        start_s = time.monotonic()
        if reason := why_modules(config):
            raise ProgramUnsupportedError(reason)
        decoder = packed.decoder
        if reason := why_no_adapters(config, decoder):
            raise ProgramUnsupportedError(reason)
        self.kernels = _kernels(config, decoder.kernel_variant)
        layers = decoder.layer_groups
        bytes_per_token = layers.share_of_block(decoder.kv_bytes_per_token)
        num_blocks = num_kv_blocks(config, bytes_per_token, decoder.max_model_len, layers.groups)
        num_slots = num_state_slots(config, decoder.state_bytes, num_blocks) if decoder.state_bytes else 0
        num_backups = config.max_speculative_step_tokens if num_slots else 0
        most_once_more = num_backups * (config.speculative_config or SpeculativeConfig()).num_speculative_tokens
        rows = SamplingRows(config.max_num_seqs, decoder.vocab_size, decoder.eos_token_ids)
        self._sampler = Sampler(rows, NativeSampling(self.kernels, rows))
        self.adapters = NativeAdapters(config, decoder, self.kernels.library) if config.enable_lora else None
        adapters = None if self.adapters is None else ProgramAdapters(self.adapters.step, config.max_lora_rank)
        self.program = DecoderProgram(
            self.kernels, packed, num_blocks, config.block_size,
            max_tokens=config.max_num_batched_tokens + most_once_more,
            max_samples=max(config.max_step_samples, PIECE_TOKENS),
            adapters=adapters,
            num_state_slots=num_slots + num_backups,
        )  # fmt: skip
        self._states = SlotContents(num_slots, num_backups) if num_slots else None
        forward = _Forward(self.program, packed, self.adapters, self._states, config.max_num_batched_tokens)
        self._steps = HostSteps(forward, self._sampler, decoder.vocab_size)
        note(f"kernels {decoder.kernel_report}")
        self._info = ModelInfo(
            model_type=decoder.model_type,
            vocab_size=decoder.vocab_size,
            max_model_len=decoder.max_model_len,
            eos_token_ids=decoder.eos_token_ids,
            block_size=config.block_size,
            num_blocks=num_blocks,
            dtype=decoder.dtype,
            device=config.device,
            load_s=time.monotonic() - start_s,
            description=(
                f"cpu, {decoder.dtype}, {self.kernels.num_threads} threads, {decoder.linear_kind} linear layers, "
                f"one native program{_text_of_states(decoder.state_bytes, num_slots)}"
            ),
            weight_bytes=packed.memories.resident.nbytes,
            kv_bytes_per_token=decoder.kv_bytes_per_token,
            held_weight_bytes=packed.memories.resident.nbytes + packed.memories.mapped.nbytes,
            kv_bytes=num_blocks * config.block_size * bytes_per_token,
            kv_groups=groups_with_draft_replay(layers.groups, config) if num_slots else layers.groups,
            state_bytes=decoder.state_bytes,
            num_state_slots=num_slots,
            path="native",
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def add_row(self, row: int, request: InferRequest) -> None:
        if self.adapters is not None:
            self.adapters.set_row(row, request.lora_name)
        else:
            refuse_adapter(request.lora_name)
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)
        if self._states is not None:
            self._states.forget(row)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        return self._steps.execute(plan, table)

    def close(self) -> None:
        self.kernels.close()
        del self._steps, self._sampler, self.program


def _text_of_states(state_bytes: int, num_slots: int) -> str:
    if not state_bytes:
        return ""
    return f", {state_bytes / 1e6:.3g} MB of recurrent state per sequence, room for {num_slots} of them"


def _kernels(config: EngineConfig, variant: str) -> NativeKernels:
    library = load(variant)
    if library is None:
        raise OSError(f"the model was packed for the native kernels '{variant}', which cannot be used here")
    return NativeKernels(library, engine_threads(config))


class _Forward:
    """The program with a step's table."""

    def __init__(
        self,
        program: DecoderProgram,
        packed: PackedModel,
        adapters: NativeAdapters | None,
        states: SlotContents | None,
        max_tokens: int,
    ) -> None:
        self._program, self._adapters = program, adapters
        self._slots, self._max_tokens = states, max_tokens
        self._tables = FilePages(packed.memories.mapped) if packed.memories.is_file else None
        self._step: FlatStep

    def logits(self, plan: StepPlan, table: RowTable) -> Float32Array | None:
        """Logits float32 [samples, vocab], valid until the next step; None if no row samples."""
        self._step = flatten(plan, table)
        if self._tables is not None:
            self._tables.read(len(self._step.token_ids))
        if self._slots is not None:
            if (behind := self._slots.num_tokens_to_replay(self._step, table)) is not None:
                self._step = flatten_from(plan, table, behind)
            for row in self._slots.lost(self._step, table):
                self._recompute(row, table, self._slots)
        logits = self._run(self._step, table, plan.num_draft_tokens)
        return logits if len(logits) else None

    def _run(self, step: FlatStep, table: RowTable, num_drafts: Int32Array | None) -> Float32Array:
        if self._slots is None:
            return self._compute(step, table)
        states = self._slots.begin(step, table, num_drafts)
        logits = self._compute(step, table, states)
        self._slots.end(step, states)
        return logits

    def _compute(self, step: FlatStep, table: RowTable, states: StepStates | None = None) -> Float32Array:
        slots, blocks = step.slots_of_groups(table), step.blocks_in_use(table)
        has_adapters = self._adapters is not None and self._adapters.begin(step)
        return self._program.forward(step, slots, blocks, states, has_adapters)

    def _recompute(self, row: int, table: RowTable, contents: SlotContents) -> None:
        """Recomputes everything the row had computed, with the same bits, to restore its state."""
        computed = int(table.num_computed_tokens[row])
        for begin in range(0, computed, self._max_tokens):
            step = part_of_row(table, row, begin, min(begin + self._max_tokens, computed))
            states = contents.begin_recompute(step, table)
            self._compute(step, table, states)
            contents.end(step, states)

    def logits_behind(self, row: int, positions: Int32Array) -> Float32Array:
        step = self._step
        return self._program.logits_behind(step, step.tokens_at(row, positions))
