"""Where a step's time goes: the operations of a native program by role, with their time, compute and memory traffic.

Used by `llmbackend bench --profile`. Invariants: counts depend on an operation's shape and the step, not on how a
library computes it; a time is the minimum of several rounds.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ..kernels.library import packed_bytes
from ..kernels.operations import AttentionOp, EmbedOp, ExpertsOp, HeadsOp, LinearOp, Rows, Type
from ..messages import ModelInfo
from ..step import FlatStep, Int32Array, RowTable, StepPlan, flatten
from .decoder_program import DecoderProgram, Float64Array
from .native_memory import TYPE_BYTES
from .native_runner import NativeRunner
from .operations import Role
from .recurrent_operations import StepStates

PROMPT_TOKENS: Final = 1024
CONTEXT_TOKENS: Final = 1024
"""Context of each row in a decode step."""
_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_S = 3, 50, 3.0


class Counts(NamedTuple):
    """Work of one operation in one step. Attention counts only what queries can see."""

    operations: int = 0
    """Multiplications and additions of matrix products, in the type of the numbers."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    """Keys and values, each counted once."""


class RoleTime(msgspec.Struct, frozen=True):
    role: Role
    seconds: float
    operations: int
    weight_bytes: int
    kv_bytes: int


class StepProfile(msgspec.Struct, frozen=True):
    """One or more consecutive steps. Roles are listed in the order in which they first run."""

    title: str
    num_tokens: int
    roles: tuple[RoleTime, ...]
    whole_s: float
    """Including the Python time of a step."""

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.roles)

    @property
    def operations(self) -> int:
        return sum(each.operations for each in self.roles)


class EngineProfile(msgspec.Struct, frozen=True):
    description: str
    weights: str
    """Type of the weights in linear layers."""
    peak_rate: float
    """Operations per second of all threads if each only multiplied registers, as for these weights."""
    steps: tuple[StepProfile, ...]


class Batch(NamedTuple):
    """What a program computes in one step."""

    step: FlatStep
    slots: Int32Array
    block_tables: Int32Array
    states: StepStates


def profile_runner(runner: NativeRunner, max_tokens: int, max_rows: int) -> EngineProfile:
    """A prefill in steps of max_tokens, and decode steps of one row and of max_rows."""
    info, program, kernels = runner.info, runner.program, runner.kernels
    weights = next(Type(op.weight_type) for _, op in program.operations if isinstance(op, LinearOp))
    steps = [_profile_prompt(program, info, max_tokens)]
    steps += [_profile_decode(program, info, rows, max_tokens) for rows in sorted({1, min(max_rows, max_tokens)})]
    peak_rate = kernels.library.peak_rate(weights) * kernels.num_threads
    return EngineProfile(info.description, weights.name.lower(), peak_rate, tuple(steps))


def _profile_prompt(program: DecoderProgram, info: ModelInfo, max_tokens: int) -> StepProfile:
    length = min(PROMPT_TOKENS, _longest(info, 1))
    batches = chunks(_table(info, 1, length), 0, length, max_tokens)
    in_steps = "in one step" if len(batches) == 1 else f"in {len(batches)} steps of at most {max_tokens:,}"
    return profile_batches(program, f"a prompt of {length:,} tokens {in_steps}", batches)


def _profile_decode(program: DecoderProgram, info: ModelInfo, rows: int, max_tokens: int) -> StepProfile:
    rows = min(rows, info.num_blocks // info.kv_groups.count, info.num_state_slots or rows)
    context = min(CONTEXT_TOKENS, _longest(info, rows) - 1)
    table = _table(info, rows, context + 1)
    for batch in chunks(table, 0, context, max_tokens // rows):
        program.write_kv(*batch)
    title = f"a decode step of {rows} row{'s' * (rows > 1)} with {context:,} tokens before it"
    return profile_batches(program, title, chunks(table, context, context + 1, 1))


def profile_batches(program: DecoderProgram, title: str, batches: Sequence[Batch]) -> StepProfile:
    for batch in batches:
        program.forward(*batch)
    least, whole_s = _least_seconds(program, batches)
    timed: dict[Role, list[tuple[float, Counts]]] = {role: [] for role, _ in program.operations}
    for batch, seconds in zip(batches, least, strict=True):
        for (role, op), taken in zip(program.operations, seconds, strict=False):
            timed[role].append((float(taken), count(op, batch.step)))
    num_tokens = sum(len(batch.step.token_ids) for batch in batches)
    return StepProfile(title, num_tokens, tuple(_sum(role, times) for role, times in timed.items()), whole_s)


def _sum(role: Role, times: Sequence[tuple[float, Counts]]) -> RoleTime:
    counts = [each for _, each in times]
    return RoleTime(
        role,
        seconds=sum(seconds for seconds, _ in times),
        operations=sum(each.operations for each in counts),
        weight_bytes=sum(each.weight_bytes for each in counts),
        kv_bytes=sum(each.kv_bytes for each in counts),
    )


def _least_seconds(program: DecoderProgram, batches: Sequence[Batch]) -> tuple[list[Float64Array], float]:
    """For each operation of each batch, and for all batches as a whole."""
    rounds: list[list[Float64Array]] = []
    whole: list[float] = []
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and sum(whole) < _ENOUGH_S):
        begin = time.perf_counter()
        rounds.append([program.profile(*batch) for batch in batches])
        whole.append(time.perf_counter() - begin)
    return [np.min(of_batch, axis=0) for of_batch in zip(*rounds, strict=True)], min(whole)


def count(op: ctypes.Structure, step: FlatStep) -> Counts:
    if isinstance(op, LinearOp):
        rows = len(step.token_ids) if op.rows == Rows.TOKENS else len(step.sampled_tokens)
        matrices = 2 if op.weight2 else 1
        size_bytes = packed_bytes(op.n, op.k, Type(op.weight_type))
        return Counts(2 * rows * op.n * op.k * matrices, size_bytes * matrices)
    if isinstance(op, ExpertsOp):
        pairs, linear = len(step.token_ids) * op.top_k, op.linear
        numbers = linear.n * linear.k * (2 if linear.weight2 else 1)
        read = min(pairs, op.num_experts)  # if tokens choose as many different ones as possible
        return Counts(2 * pairs * numbers, read * (2 if linear.weight2 else 1) * op.weight_bytes)
    if isinstance(op, HeadsOp):
        linear = op.linear
        size_bytes = op.num_heads * packed_bytes(linear.n, linear.k, Type(linear.weight_type))
        return Counts(2 * len(step.token_ids) * op.num_heads * linear.n * linear.k, size_bytes)
    if isinstance(op, EmbedOp):
        return Counts(weight_bytes=len(step.token_ids) * op.width * TYPE_BYTES[Type(op.weight_type)])
    if isinstance(op, AttentionOp):
        window = op.window or int(step.seq_lens.max())
        seen_by_queries = int(np.minimum(step.positions + 1, window).sum(dtype=np.int64))
        seen_by_rows = int(np.minimum(step.seq_lens, step.query_lens + (window - 1)).sum(dtype=np.int64))
        numbers = op.num_kv_heads * (op.head_dim + (op.value_dim if op.values else 0))
        of_position = numbers * TYPE_BYTES[Type(op.kv_type)]
        of_pair = 2 * op.num_heads * (op.head_dim + op.value_dim)
        return Counts(of_pair * seen_by_queries, kv_bytes=seen_by_rows * of_position)
    return Counts()


def _longest(info: ModelInfo, rows: int) -> int:
    """Length in tokens that this many rows can have at once."""
    return min(info.max_model_len, info.num_blocks // (info.kv_groups.count * rows) * info.block_size)


def _table(info: ModelInfo, rows: int, length: int) -> RowTable:
    """Rows of random tokens with their own blocks."""
    table = RowTable(rows, length, info.block_size, info.kv_groups.count)
    table.token_ids[:] = np.random.default_rng(0).integers(0, info.vocab_size, table.token_ids.shape)
    table.num_tokens[:] = length
    table.block_tables[:] = np.arange(table.block_tables.size).reshape(table.block_tables.shape)
    return table


def chunks(table: RowTable, begin: int, end: int, size: int) -> list[Batch]:
    """Tokens begin..end-1 of all rows, in steps of `size` tokens per row. Rows sample at their end."""
    batches = []
    rows = np.arange(table.max_num_seqs, dtype=np.int32)
    for start in range(begin, end, size):
        stop = min(start + size, end)
        table.num_computed_tokens[:] = start
        is_sampled = np.full(len(rows), stop == int(table.num_tokens[0]))
        step = flatten(StepPlan(rows, np.full_like(rows, stop - start), is_sampled), table)
        states = StepStates(rows, rows if start else np.full_like(rows, -1), np.full_like(step.token_ids, -1))
        batches.append(Batch(step, step.slots_of_groups(table), step.blocks_in_use(table), states))
    return batches
