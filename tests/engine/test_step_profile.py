"""The profile of a step: what it counts, and that its times are those of the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbackend.cli.bench_profile import run_profile
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.operations import Role
from llmbackend.engine.cpu.step_profile import EngineProfile, RoleTime, StepProfile, chunks, profile_runner
from llmbackend.engine.kernels import library
from llmbackend.engine.step import RowTable
from tests.engine.test_decoder_program import MODULES, PROGRAMS, SIZES, save
from tests.engine.test_native_runner import config_of, packed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

CHUNK, ROWS = 40, 3
LENGTH, WIDTH, INNER, LAYERS = (
    SIZES[name] for name in ("max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers")
)
HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 2, 32, SIZES["vocab_size"]
MATRICES = {
    Role.QKV: LAYERS * WIDTH * (HEADS + 2 * KV_HEADS) * HEAD_DIM,
    Role.ATTENTION_OUT: LAYERS * WIDTH * HEADS * HEAD_DIM,
    Role.GATE_UP: LAYERS * WIDTH * 2 * INNER,
    Role.DOWN: LAYERS * WIDTH * INNER,
}
"""Numbers of all layers, all of whose sizes are multiples of a panel's."""
OF_ALL = {Role.EMBEDDING, Role.NORM, Role.QKV, Role.ROTARY, Role.ATTENTION, Role.ATTENTION_OUT, Role.HEAD}
OF_EXPERTS = {Role.ROUTE, Role.EXPERTS_GATE_UP, Role.EXPERTS_DOWN, Role.MIX}


def profile_of(path: Path, family: str, **options: Any) -> EngineProfile:
    config = config_of(path, num_kv_blocks=20, max_num_batched_tokens=CHUNK, **options)
    runner = NativeRunner(config, packed(path, family, **options))
    profile = profile_runner(runner, CHUNK, ROWS)
    runner.close()
    return profile


def by_role(step: StepProfile) -> dict[Role, RoleTime]:
    return {each.role: each for each in step.roles}


def seen(begin: int, end: int, window: int) -> tuple[int, int]:
    """Pairs of queries begin..end-1 and positions that they see, and all these positions."""
    positions = [range(max(0, query + 1 - window) if window else 0, query + 1) for query in range(begin, end)]
    return sum(map(len, positions)), len(set().union(*positions))


@pytest.mark.parametrize(("family", "window"), [("qwen2", 0), ("mistral", 8)])
def test_counts_follow_from_the_shapes(family: str, window: int, tmp_path: Path) -> None:
    prompt, one, many = profile_of(tmp_path, family).steps
    starts = range(0, LENGTH, CHUNK)
    for step, rows, parts in (
        (prompt, 1, [(start, min(start + CHUNK, LENGTH)) for start in starts]),
        (one, 1, [(LENGTH - 1, LENGTH)]),
        (many, ROWS, [(LENGTH - 1, LENGTH)]),
    ):
        roles = by_role(step)
        num_tokens = rows * sum(end - begin for begin, end in parts)
        assert step.num_tokens == num_tokens
        for role, size in MATRICES.items():
            assert roles[role].operations == 2 * num_tokens * size, role
            assert roles[role].weight_bytes == len(parts) * 4 * size, role
        assert roles[Role.HEAD].operations == 2 * rows * WIDTH * VOCAB
        assert roles[Role.HEAD].weight_bytes == 4 * WIDTH * VOCAB
        assert roles[Role.EMBEDDING].weight_bytes == 4 * num_tokens * WIDTH
        counts = [seen(begin, end, window) for begin, end in parts]
        pairs, positions = (rows * sum(each) for each in zip(*counts, strict=True))
        attention = roles[Role.ATTENTION]
        assert attention.operations == 2 * pairs * 2 * LAYERS * HEADS * HEAD_DIM
        assert attention.kv_bytes == positions * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
        assert step.operations == sum(each.operations for each in step.roles)


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("qwen3", torch.float32, {}),
        ("gemma3", torch.bfloat16, {}),
        ("qwen2", torch.bfloat16, {"quantization": "int8"}),
        ("qwen3_moe", torch.float32, {}),
    ],
)
def test_all_operations_are_timed(family: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    """gemma3: two groups of layers, which are several native calls."""
    config = config_of(tmp_path, num_kv_blocks=20, max_num_batched_tokens=LENGTH, **options)
    runner = NativeRunner(config, packed(tmp_path, family, dtype, **options))
    profile = profile_runner(runner, LENGTH, ROWS)
    runner.close()
    assert profile.weights == options.get("quantization", str(dtype).removeprefix("torch."))
    assert profile.peak_rate > 0
    for step in profile.steps:
        own = OF_EXPERTS if family == "qwen3_moe" else {Role.GATE_UP, Role.DOWN}
        assert {each.role for each in step.roles} == OF_ALL | own
        assert all(each.seconds > 0 for each in step.roles)
    whole_s = profile.steps[0].whole_s
    assert 0.5 * whole_s < profile.steps[0].seconds <= whole_s


def test_a_profiled_step_computes_the_same(tmp_path: Path) -> None:
    runner = NativeRunner(config_of(tmp_path, num_kv_blocks=8), packed(tmp_path, "gemma2"))
    table = RowTable(2, 12, 32, runner.info.kv_groups.count)
    table.token_ids[:] = np.arange(24).reshape(2, 12)
    table.num_tokens[:] = 12
    table.block_tables[:] = np.arange(table.block_tables.size).reshape(table.block_tables.shape)
    [batch], other = chunks(table, 0, 12, 12), chunks(table, 0, 12, 5)
    expected = runner.program.forward(*batch).copy()
    for one in other:
        runner.program.forward(*one)
    assert len(runner.program.profile(*batch)) == len(runner.program.operations)
    assert np.array_equal(runner.program.logits_behind(batch.step, batch.step.sampled_tokens), expected)
    runner.close()


def test_what_has_no_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a native program, and there is none here: it is the mock model"):
        run_profile(model="mock")
    with pytest.raises(ValueError, match="there is none here: enforce_eager is set"):
        run_profile(model="unread", enforce_eager=True)
    save(MODULES["head_dim 24"], tmp_path)
    with pytest.raises(ValueError, match=r"there is none here: cpu, float32, .*modules"):
        run_profile(model=str(tmp_path), transport="inline")


def test_tables_and_json_have_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(PROGRAMS["qwen2"], tmp_path)
    out = tmp_path / "out.json"
    profile = run_profile(out, model=str(tmp_path), transport="inline", num_threads=1, num_kv_blocks=20)
    written = json.loads(out.read_text())
    assert [step["title"] for step in written["steps"]] == [step.title for step in profile.steps]
    shown = capsys.readouterr().out
    for step in profile.steps:
        assert step.title in shown
        for each in step.roles:
            assert f"\n{each.role:<18}{each.seconds * 1e3:>10,.3f}" in shown
    assert shown.count("% of the peak of ") == 3
