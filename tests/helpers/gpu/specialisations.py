"""Finds the kernels that an engine would compile while serving, without compiling any: a kernel is compiled for types,
constants, and properties of argument values (addresses and numbers divisible by 16, the number 1).

Used by the test that nothing is compiled after start. Independent of which kernels. Runs in a process of its own, as
compile_kernels.py, whose driver it uses. Launches have no effect: their outputs stay unchanged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from llmbackend.engine.config import SpeculativeConfig
from llmbackend.engine.gpu.gpu_runner import GpuRunner
from llmbackend.engine.gpu.program import GpuProgram
from llmbackend.engine.gpu.weights import int4
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.compatibility import CheckedModel
from llmbackend.engine.step import PromptLogprobs, RowTable, StepPlan
from llmbackend.engine.token_masks import TokenMasks, all_tokens
from tests.helpers.gpu.compile_kernels import _target_alone
from tests.helpers.gpu.gpu_engines import config_for, gpu_runner

HOPPER = 90
MAX_NUM_SEQS, BLOCK_SIZE = 21, 16

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_p": 0.9},
    {"top_k": 4, "logprobs": 2},
    {"logprobs": 0, "presence_penalty": 1.0},
    {"top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 3},
    {"logit_bias": {3: 1.0}, "temperature": 0.0},
    {"allowed_token_ids": (3, 4, 5)},
    {"min_tokens": 2, "min_p": 0.1},
)
DRAFTS = ([3], [66], [1] * 10, [2] * 20, [0, 4, 1])
"""Of each row of a step."""
SHAPES = ([1], [7], [300], [1] * 3, [1] * 16, [1] * MAX_NUM_SEQS, [1, 5], [2] * 20, [1, 1, 290, 16])
"""Tokens of each row of a step."""


def compiled_after_start(model: Path, *options: dict[str, Any]) -> list[list[str]]:
    """What requests of every kind would have compiled, in steps of every shape, with each of the engine arguments."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, str(model), json.dumps(options)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    found: list[list[str]] = json.loads(output)
    return found


@contextmanager
def recorded_specialisations() -> Iterator[set[str]]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: set[str] = set()

    def only_record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        *_, binder = self.device_caches[HOPPER]
        _, specialization, options = binder(*args, debug=False, instrumentation_mode="", **kwargs)
        found.add(f"{self.fn.__name__} {specialization} {sorted(options.items())}")

    driver.set_active(_target_alone(HOPPER))
    with (
        mock.patch.object(JITFunction, "run", only_record),
        mock.patch.object(GpuProgram, "verify"),
        mock.patch.object(CheckedModel, "difference", return_value=""),
        mock.patch.object(int4, "has_kernel", return_value=True),
    ):
        yield found


def _serve(
    runner: GpuRunner, way: SamplingParams, counts: list[int], behind: int, drafts: list[int] | None = None
) -> None:
    """A step of rows with so many tokens each, and drafts behind them, behind so many keys."""
    table = RowTable(MAX_NUM_SEQS, runner.info.max_model_len, BLOCK_SIZE)
    for row in range(len(counts)):
        lora = "" if runner.adapters is None or row % 2 else "doll"
        request = InferRequest(request_id=f"{row}", prompt_token_ids=(1,) * 8, sampling=way, lora_name=lora)
        runner.add_row(row, request)
    scheduled = np.array(counts, np.int32)
    table.num_computed_tokens[:] = behind
    table.num_prompt_tokens[: len(counts)] = table.num_tokens[: len(counts)] = behind + scheduled
    if behind == 0 and counts[0] > 1:
        table.prompt_logprobs[0] = PromptLogprobs(1, 2)
    words = all_tokens(runner.info.vocab_size)[np.newaxis].repeat(2, 0)
    rows, samples, drafted = np.arange(len(counts), dtype=np.int32), np.ones(len(counts), np.bool_), None
    if drafts is not None:
        drafted = np.array(drafts, np.int32)
        scheduled = scheduled + drafted
    plan = StepPlan(rows, scheduled, samples, drafted)
    masks = TokenMasks(np.zeros(plan.num_samples, np.int32), words) if way.allowed_token_ids else None
    runner.execute(replace(plan, masks=masks), table)
    for row in rows.tolist():
        runner.remove_row(row)


def _after_start(model: str, options: dict[str, Any]) -> list[str]:
    limits = {"max_num_seqs": MAX_NUM_SEQS, "block_size": BLOCK_SIZE, "max_num_batched_tokens": 320}
    if (speculation := options.pop("speculative_config", None)) is not None:
        options["speculative_config"] = SpeculativeConfig(**speculation)
    config = config_for(Path(model), **limits, **options)
    with recorded_specialisations() as found:
        runner = gpu_runner(config, triton=True)
        if runner.adapters is not None:
            runner.adapters.add("doll", {})
        at_start = set(found)
        for counts in SHAPES:
            for behind in (0, 500):
                _serve(runner, SamplingParams(), counts, behind)
        for way in WAYS:
            for counts in ([1], [1] * 3, [1] * 16, [1, 5]):
                _serve(runner, SamplingParams(**way), counts, 0)
        if config.may_draft:
            for drafts in DRAFTS:
                for way in WAYS:
                    _serve(runner, SamplingParams(**way), [1] * len(drafts), 500, drafts)
        runner.close()
    assert at_start, "nothing was launched at start"
    return sorted(found - at_start)


if __name__ == "__main__":
    json.dump([_after_start(sys.argv[1], options) for options in json.loads(sys.argv[2])], sys.stdout)
