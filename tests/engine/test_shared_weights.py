"""Engines that share packed weights, for real: what each process imports and maps, and where each of them may die."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file, save_file

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.messages import EngineInput, InferRequest, SamplingParams
from llmbackend.engine.process.supervisor import ForkedEngines, Supervisor
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.supervised_engines import load, pid_of, server_pid_of

pytestmark = pytest.mark.slow

DEMO = str(Path(__file__).resolve().parents[2] / "model_repository" / "demo" / "1")
MakeSupervisor = Callable[..., Supervisor]


@pytest.fixture
def make_supervisor(tmp_path: Path) -> Iterator[MakeSupervisor]:
    made = []

    def make(**arguments: Any) -> Supervisor:
        options = {"weight_cache_dir": str(tmp_path / "cache"), "num_kv_blocks": 16, "num_threads": 1, **arguments}
        wakeup = Wakeup()
        config = EngineConfig(**{"model": DEMO, **options})
        supervisor = Supervisor(config, ForkedEngines(config, RUNNERS), wakeup)
        made.append((supervisor, wakeup))
        return supervisor

    yield make
    for supervisor, wakeup in made:
        supervisor.close()
        wakeup.close()


def kill(supervisor: Supervisor) -> None:
    """The engine, and waits until this is noticed."""
    os.kill(pid_of(supervisor), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        while True:
            supervisor.receive(is_busy=False)


def tokens_of(supervisor: Supervisor) -> list[int]:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    supervisor.send(EngineInput((InferRequest(request_id="r", prompt_token_ids=(5, 9, 17, 33), sampling=sampling),)))
    token_ids: list[int] = []
    while True:
        for result in supervisor.receive(is_busy=True):
            for output in result.outputs:
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    return token_ids


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def on_huge_pages(pid: int) -> dict[str, dict[str, int]]:
    """Of /proc/PID/smaps: the mappings for which huge pages were asked, by range of addresses; numbers are in KiB."""
    found: dict[str, dict[str, int]] = {}
    place, numbers = "", dict[str, int]()
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            place, numbers = head, {}
        elif head == "VmFlags:" and "hg" in rest.split():
            found[place] = numbers
        elif rest.endswith(" kB"):
            numbers[head[:-1]] = int(rest[:-3])
    return found


def image_of(directory: Path) -> Path:
    (image,) = (directory / "cache").glob("*.image")
    return image


def test_engines_share_what_the_first_process_packed(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    first, second = make_supervisor(), make_supervisor()
    info = load(first)
    assert any("weights packed: " in path for path in info.paths) and not info.needs_torch
    assert {"pack", "verify", "write packed weights", "program"} <= {part.name for part in info.parts}
    assert [part.name for part in load(second).parts] == ["program"], "the fork server has everything"
    tokens = tokens_of(first)
    assert tokens_of(second) == tokens
    engines = pid_of(first), pid_of(second)
    assert not any(has_torch(pid) for pid in (server_pid_of(first), *engines))
    _expect_shared_weights(server_pid_of(first), engines, image_of(tmp_path).stat().st_size)

    kill(first)
    assert [part.name for part in load(first).parts] == ["program"]
    assert tokens_of(first) == tokens

    os.kill(server_pid_of(second), signal.SIGKILL)  # a new one finds the image on disk
    kill(second)
    again = load(second)
    assert any("weights from" in path for path in again.paths) and not has_torch(pid_of(second))
    assert tokens_of(second) == tokens


def test_replaced_weights_are_read_while_engines_of_the_old_ones_run(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(DEMO, tmp_path / "model"))
    first = make_supervisor(model=str(model))
    load(first)
    old = tokens_of(first)
    weights = load_file(model / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, model / "model.safetensors")
    second = make_supervisor(model=str(model))
    load(second)
    new = tokens_of(second)
    assert new != old
    kill(first)
    load(first)
    assert tokens_of(first) == old
    other = make_supervisor(model=str(model), weight_cache_dir=str(tmp_path / "other"))
    load(other)
    assert tokens_of(other) == new


def _expect_shared_weights(server_pid: int, engine_pids: tuple[int, ...], size_bytes: int) -> None:
    """What the server has on huge pages, the weights, is the same memory in all engines."""
    there = on_huge_pages(server_pid)
    weights = max(there, key=lambda place: there[place]["Rss"])
    assert there[weights]["Rss"] > size_bytes // 1024 // 2
    for pid in engine_pids:
        engine = on_huge_pages(pid)[weights]
        assert engine["Rss"] == there[weights]["Rss"] and engine["Private_Dirty"] == 0, "an engine wrote to it"
        assert engine["AnonHugePages"] == there[weights]["AnonHugePages"]
        assert engine["Pss"] < 0.4 * engine["Rss"]


@pytest.mark.parametrize("dies_while_it_packs", [False, True])
def test_without_a_cache_packed_weights_stay_in_memory(
    dies_while_it_packs: bool, make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    supervisor = make_supervisor(weight_cache_size=0.0)
    if dies_while_it_packs:
        _kill_while_it_packs(supervisor)
    info = load(supervisor)
    assert any("the weight cache is off" in path for path in info.paths)
    tokens = tokens_of(supervisor)
    kill(supervisor)
    assert [part.name for part in load(supervisor).parts] == ["program"]
    assert tokens_of(supervisor) == tokens
    assert not (tmp_path / "cache").exists()


def _kill_while_it_packs(supervisor: Supervisor) -> None:
    with pytest.raises(EngineDeadError) as caught:
        while True:
            supervisor.receive(is_busy=False)
            if supervisor._transport is not None and has_torch(pid_of(supervisor)):
                os.kill(pid_of(supervisor), signal.SIGKILL)
    assert caught.value.kind == "killed"


def test_a_model_that_runs_as_modules_is_loaded_in_its_engine(make_supervisor: MakeSupervisor) -> None:
    supervisor = make_supervisor(enforce_eager=True)
    info = load(supervisor)
    assert info.needs_torch and any("modules" in text for text in (info.description, *info.paths))
    assert has_torch(pid_of(supervisor)) and has_torch(server_pid_of(supervisor)), "imports are shared, as they can be"
    assert len(tokens_of(supervisor)) == 12
    kill(supervisor)
    load(supervisor)
    assert len(tokens_of(supervisor)) == 12


def test_a_model_that_turns_out_to_run_as_modules_is_run_by_the_process_that_loaded_it(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    from tests.helpers.tiny_models import FAMILIES, random_model  # imports torch

    random_model(FAMILIES["gpt2"]).save_pretrained(tmp_path / "model")
    supervisor = make_supervisor(model=str(tmp_path / "model"))
    info = load(supervisor)
    assert info.needs_torch and any("modules, because" in path for path in info.paths)
    assert not has_torch(server_pid_of(supervisor)), "nobody could know"
    tokens = tokens_of(supervisor)
    kill(supervisor)
    load(supervisor)
    assert has_torch(server_pid_of(supervisor)), "now it is known"
    assert tokens_of(supervisor) == tokens
    assert not list((tmp_path / "cache").glob("*.*age")) and not list((tmp_path / "cache").glob("*.unfinished"))


def test_two_processes_pack_one_after_the_other(make_supervisor: MakeSupervisor, tmp_path: Path) -> None:
    both = make_supervisor(), make_supervisor()
    while any(supervisor.info is None for supervisor in both):
        for supervisor in both:
            if supervisor.info is None:
                supervisor._wakeup.set()
                supervisor.receive(is_busy=False)
                supervisor._wakeup.clear()
    packed = [[part.name for part in supervisor.info.parts].count("pack") for supervisor in both if supervisor.info]
    assert sorted(packed) == [0, 1], "the second one waited, and found it packed"
    assert tokens_of(both[0]) == tokens_of(both[1])
    assert len(psutil.Process(server_pid_of(both[0])).children()) == 2
    assert image_of(tmp_path)
