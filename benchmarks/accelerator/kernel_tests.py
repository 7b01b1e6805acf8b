"""Runs the kernel tests on the device instead of in Triton's interpreter.

    python -m benchmarks.accelerator.kernel_tests --device cuda --json FILE --scratch FOLDER

Covers odd sizes of all kernels. Independent of what the tests check. Invariants: only the conftest files next to the
tests are read, because the one above them needs all packages of a server; warnings of other versions of torch or
pytest, and missing plugins, fail nothing; each failed test is named in the results, even if time ran out before all
tests had run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from .outcomes import FILE
from .section import WORKERS, Section, run_alone

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 85.0
"""Less than the section has (parts.py)."""
TESTS = (
    "int4_matmul",
    "experts::test_a_token_gets_the_sum_of_its_experts",
    "experts::test_many_tokens_are_sorted_in_several_passes_into_several_tiles",
    "experts::test_a_token_is_its_own_bit_by_bit",
    "experts::test_packed_experts_are_multiplied_as_the_numbers_they_stand_for",
    "lora_kernels",
    "paged_attention",
    "device_sampler",
    "fused_kernels",
    "invariant_matmul",
    "eight_bit_kernels::test_rows_are_rounded_behind_a_norm_a_gate_or_alone",
    "eight_bit_kernels::test_a_broken_row_has_no_scale_and_changes_no_other",
    "eight_bit_kernels::test_a_product_is_that_of_the_numbers",
    "host_blocks::test_blocks_move_by_a_kernel_as_they_do_without",
    "work_lists",
)
"""Those that run on a GPU as well (tests/helpers/gpu/kernel_device.py)."""
FEW = ("fused_kernels::test_embed_scales_rows_and_ignores_ids_outside_the_table",)
WITHOUT = ("int4_matmul::test_it_compiles", "lora_kernels::test_they_compile")
"""What other processes compile takes a minute, and needs no GPU."""


def measure(section: Section) -> None:
    outcomes = section.scratch / "outcomes.jsonl"
    outcomes.touch()
    on_device = {"LLMBACKEND_TEST_DEVICE": section.device} if section.on_gpu else {"TRITON_INTERPRET": "1"}
    is_done = _run(section, {**os.environ, **on_device, FILE: str(outcomes)})
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    tests = {line["test"]: line["outcome"] for line in lines}  # of a test that passed and then failed the last one
    failed = [test for test, outcome in tests.items() if outcome == "failed"]
    passed, skipped = (sum(outcome == wanted for outcome in tests.values()) for wanted in ("passed", "skipped"))
    section.add(measure="tests", passed=passed, skipped=skipped, failed=failed, all_ran=is_done)
    section.fail([*failed, *([] if is_done else [f"{len(tests)} tests were not all"]), *([] if tests else ["no test"])])


def _run(section: Section, environment: dict[str, str]) -> bool:
    """Whether all tests were run in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/engine"]
    command += ["-p", "benchmarks.accelerator.outcomes", "-o", "filterwarnings=default", "-o", "addopts="]
    if section.on_gpu and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    command += [f"--deselect={_node(name)}" for name in WITHOUT]
    command += map(_node, TESTS if section.on_gpu else FEW)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # 0 and 1: all passed, some failed; else tests could not be collected
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S).returncode in (0, 1)
    return False


def _node(name: str) -> str:
    file, _, test = name.partition("::")
    return f"tests/engine/gpu/test_{file}.py" + (f"::{test}" if test else "")


if __name__ == "__main__":
    run_alone("kernel_tests", measure)
