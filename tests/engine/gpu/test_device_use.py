"""The device of an engine's process: taken first of all, and given up with the process when it is lost."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import DeviceLostError, ProgramUnsupportedError
from llmbackend.engine.gpu import make_gpu_runner
from llmbackend.engine.gpu.device import Device
from llmbackend.engine.gpu.make_gpu_runner import choose, start
from llmbackend.engine.gpu.parallel import parts
from llmbackend.engine.gpu.parallel.collectives import RankPlace, Ranks
from llmbackend.engine.gpu.program import GpuProgram
from llmbackend.engine.messages import InferRequest, SamplingParams, StepOutput
from llmbackend.engine.model import module_runner
from llmbackend.engine.model.loader import LoadedModel, load_model
from llmbackend.engine.model.module_runner import ModelRunner, make_model_runner, run_modules_on
from llmbackend.engine.step import RowTable, Runner, SampledTokens, StepPlan
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner

pytestmark = pytest.mark.usefixtures("one_thread")


FAMILY = "llama"


# ------------------------------------------------------------------------------------------------------------ the first


class LoadingError(Exception):
    pass


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was done, in order: the current device that was set, then the load, which ends there."""
    done: list[object] = []

    def load(*args: object, **options: object) -> None:
        done.append("load")
        raise LoadingError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(module_runner, "load_model", load)
    monkeypatch.setattr(parts, "open_stored_model", load)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    return done


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:3", 3)])
def test_an_engine_computes_on_its_own_device(four_gpus: list[object], name: str, index: int) -> None:
    """Triton launches on the current device, whatever device the tensors are on."""
    with pytest.raises(LoadingError):
        make_model_runner(EngineConfig(model="m", device=name))
    assert four_gpus == [torch.device("cuda", index), "load"]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(("is_alone", "index"), [(False, 3), (True, 2)])
def test_a_rank_computes_on_its_own_device(four_gpus: list[object], is_alone: bool, index: int) -> None:
    config = EngineConfig(model="m", device="cuda:2", tensor_parallel_size=2, num_threads=1)
    with pytest.raises(LoadingError):
        parts.load_part(config, Ranks(RankPlace.of(config, 1)), is_alone)
    assert four_gpus == [torch.device("cuda", index), "load"]


def test_a_device_that_torch_has_not_is_refused(four_gpus: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'device' is 'cuda:4', but this torch .* sees 4 CUDA devices, from 0 on"):
        make_model_runner(EngineConfig(model="m", device="cuda:4"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match=r"'device' is 'cuda', but this torch .* is built for ROCm, expected a CUDA"):
        make_model_runner(EngineConfig(model="m", device="cuda"))
    assert four_gpus == []


# ----------------------------------------------------------------------------------------------------------- when lost


class FailingDevice(FakeDevice):
    """Raises `error` when work is enqueued or waited for. Lost: from then on each time it is waited for."""

    def __init__(self, error: Exception, is_lost: bool) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.is_lost = False
        self._next, self._loses = error, is_lost

    def fail(self) -> None:
        self.error = self._next

    def enqueue(self, work: Any) -> None:
        if (error := self.error) is not None:
            self.error = None
            self.is_lost = self._loses
            raise error
        super().enqueue(work)

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with …")
        super().synchronize()


def accelerator_error(code: int) -> Exception:
    error = torch.AcceleratorError("CUDA error")
    setattr(error, "error_code", code)  # noqa: B010  as torch does; its stubs do not say so
    return error


LOSSES = {
    "illegal address": (accelerator_error(700), False),
    "Triton's or cuBLAS' report": (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
}
PASSING = {
    "no memory for a tensor": torch.OutOfMemoryError("CUDA out of memory"),
    "no memory for the driver": accelerator_error(2),
    "a shape that a library refuses": RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"),
}


def core_of(model: Path, way: str, device: FailingDevice) -> EngineCore:
    config = config_for(model, async_scheduling=None if way == "overlapped" else False)
    if way == "modules":
        return EngineCore(config, OnDevice(config, device))
    core = EngineCore(config, gpu_runner(config, device, sampling=GreedyOnDevice()))
    return core


class OnDevice(ModelRunner):
    """A model's modules on a device to which each step is one piece of work."""

    def __init__(self, config: EngineConfig, device: FailingDevice) -> None:
        super().__init__(config, load_model(config, dense=True), device)
        steps = self._steps.execute

        def execute(plan: StepPlan, table: RowTable) -> SampledTokens:
            device.enqueue(lambda: None)
            return steps(plan, table)

        self._steps.execute = execute  # type: ignore[method-assign]


def request(request_id: str) -> InferRequest:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return InferRequest(request_id=request_id, prompt_token_ids=(1, 2, 3), sampling=sampling)


WAYS = ["overlapped", "one step after the other", "modules"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_an_engine_without_its_device_ends(model: Path, way: str, loss: str) -> None:
    """No request is blamed: each would fail, and the next engine computes them all."""
    device = FailingDevice(*LOSSES[loss])
    core = core_of(model, way, device)
    core.add(request("a"))
    core.add(request("b"))
    core.step()
    device.fail()
    with pytest.raises(DeviceLostError, match="this process lost the device: "):
        core.step()
    core.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_device_lost_without_a_step_in_flight_ends_the_engine(
    model: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use of the device is then that of the sampler, which pins memory."""
    error, device = LOSSES[loss][0], FailingDevice(*LOSSES[loss])

    def begin(*_: Any) -> None:
        device.is_lost = True
        raise error

    config, sampling = config_for(model), GreedyOnDevice()
    core = EngineCore(config, gpu_runner(config, device, sampling=sampling))
    monkeypatch.setattr(sampling, "begin", begin)
    core.add(request("a"))
    with pytest.raises(DeviceLostError, match="this process lost the device: "):
        core.step()
    core.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passing", PASSING)
def test_an_error_that_leaves_the_device_is_one_steps(model: Path, way: str, passing: str) -> None:
    device = FailingDevice(PASSING[passing], is_lost=False)
    core = core_of(model, way, device)
    core.add(request("a"))
    core.add(request("b"))
    core.step()
    device.fail()
    outputs: list[StepOutput] = []
    while core.has_work:
        outputs += core.step().outputs
    assert {output.request_id: output.finish_reason for output in outputs if output.finish_reason} == {
        "a": "length",
        "b": "length",
    }
    core.close()


# ------------------------------------------------------------------------------------------------------- as modules


class MeasuredDevice(FakeDevice):
    """1 MiB of which all is free until a step has run; 256 KiB less from then on."""

    def synchronize(self) -> None:
        super().synchronize()
        self.used_bytes = 256 << 10


def test_a_model_that_runs_as_modules_gets_the_memory_that_is_left(model: Path) -> None:
    """Three layers, whose KV is 256 bytes a token each; room for 4 more beside them."""
    config = config_for(model, num_kv_blocks=None, gpu_memory_utilization=0.75, max_num_seqs=64)
    device = MeasuredDevice(memory_bytes=1 << 20)
    runner: Runner = run_modules_on(device, config, load_model(config, dense=True))
    assert runner.info.num_blocks == (512 << 10) // (8 * 256 * (3 + 4))
    plan = StepPlan(np.array([0], np.int32), np.array([3], np.int32), np.ones(1, np.bool_))
    table = RowTable(64, runner.info.max_model_len, 8)
    table.num_tokens[0] = 3
    assert len(runner.execute(plan, table).token_ids) == 1
    runner.close()
    few = config_for(model, num_kv_blocks=None, gpu_memory_utilization=0.75, max_num_seqs=1, max_model_len=16)
    assert run_modules_on(device, few, load_model(few, dense=True)).info.num_blocks == 2


def test_the_memory_of_a_refused_program_is_free_when_the_modules_measure_theirs(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[weakref.ref[GpuProgram]] = []

    def refuse(program: GpuProgram, *_: object) -> None:
        programs.append(weakref.ref(program))
        raise ProgramUnsupportedError("its logits differ")

    def start_here(config: EngineConfig, loaded: LoadedModel, start_s: float) -> Runner:
        return start(config, loaded, FakeDevice(), *choose(config, loaded), start_s)

    def run_here(device: Device, *arguments: Any) -> ModelRunner:
        assert [program() for program in programs] == [None]
        return run_modules_on(device, *arguments)

    monkeypatch.setattr(GpuProgram, "verify", refuse)
    monkeypatch.setattr(make_gpu_runner, "start_on_cuda", start_here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(module_runner, "CudaDevice", lambda _: FakeDevice())
    monkeypatch.setattr(module_runner, "load_model", lambda _: load_model(config_for(model), dense=True))
    monkeypatch.setattr(module_runner, "run_modules_on", run_here)

    runner = make_model_runner(config_for(model, device="cuda"))
    assert runner.info.path_reason == "its logits differ"
    runner.close()
