"""benchmarks/gpu.py runs on a machine that has little more than torch, and keeps what it measured whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.accelerator import kernel_tests, parts
from benchmarks.accelerator.comparison import comparison
from benchmarks.accelerator.device_memory import DeviceMemory, used_bytes
from benchmarks.accelerator.packages import MISSING, unpack
from benchmarks.accelerator.parts import PART_LIMIT_S, PARTS
from benchmarks.accelerator.running import Runner
from tests.helpers.gpu.bare_machine import BareMachine, make_bare_machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> BareMachine:
    return make_bare_machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def results(machine: BareMachine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all parts, in one process, whose imports cost more than most sections."""
    out, before = (tmp_path_factory.mktemp(name) for name in ("out", "before"))
    line = {"section": "faults", "shape": "none", "label": "", "measure": "fault", "extra_s": 1.0}
    (before / "part3.jsonl").write_text(json.dumps(line) + '\n{"cut')
    command = [str(machine.python), "benchmarks/gpu.py", "--part", "1", "2", "3", "5", "--device", "cpu"]
    command += ["--out", str(out), "--packages", str(machine.packages), "--before", str(before)]
    result = subprocess.run(command, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_the_machine_is_bare(machine: BareMachine) -> None:
    names = ["torch", "transformers", "msgspec", "zmq", "grpc_health", "tritonclient", "orjson", "llmbackend"]
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    command = [str(machine.python), "-c", code]
    found = subprocess.run(command, cwd="/", env={}, check=True, capture_output=True, text=True).stdout
    assert found.strip() == "['torch', 'transformers']"


@pytest.mark.parametrize("part", [1, 2, 3, 5])
def test_every_section_of_a_part_runs_there(results: Path, part: int) -> None:
    files = {file.name for file in results.iterdir() if file.name.startswith(f"part{part}")}
    assert files == {f"part{part}{end}" for end in (".jsonl", ".md", "-logs.tar.gz")}
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (results / f"part{part}.jsonl").read_text().splitlines()
    ]
    done = [line["section"] for line in lines if line["measure"] == "section"]
    assert done == [planned.program for planned in parts.sections(part, on_gpu=False)]
    figures = {line["section"] for line in lines if line["measure"] != "section"}
    assert figures == set(done), "each leaves figures"
    page = (results / f"part{part}.md").read_text()
    assert "- only before: faults none fault" in page


def test_torchs_grouped_products_are_compared_with_the_engines(results: Path) -> None:
    lines = [json.loads(line) for line in (results / "part1.jsonl").read_text().splitlines()]
    found = {line["kind"]: line for line in lines if line["measure"] == "library" and "experts" in line["case"]}
    assert {"call_s", "error"} <= found["own"].keys() & found["grouped_mm, products alone"].keys()


def test_part_4_has_sections_of_the_others() -> None:
    programs = {part: {planned.program for planned in sections} for part, sections in PARTS.items()}
    assert programs[4] < programs[1] | programs[2] | programs[3]


def test_limits_leave_each_section_its_time() -> None:
    for part, planned in PARTS.items():
        assert sum(section.limit_s for section in planned) <= PART_LIMIT_S, part


def test_the_tests_of_kernels_that_run_on_a_gpu_are_there() -> None:
    """pytest runs none where it cannot find one."""
    for name in (*kernel_tests.TESTS, *kernel_tests.FEW, *kernel_tests.WITHOUT):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests/engine/gpu" / f"test_{file}.py").read_text() or not test, name


SECTIONS = """
import json, os, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from benchmarks.accelerator import running
from benchmarks.accelerator.device_memory import DeviceMemory
from benchmarks.accelerator.parts import Planned

out = Path(sys.argv[1])
held = out / "held"
ENGINE = "import sys, time; sys.stdin.read(); time.sleep(0.5); open(sys.argv[1], 'w').write('7')"

def used():
    return int(held.read_text())

def hangs(section):
    section.add(measure="figure", value=1.0)
    os.fork()
    time.sleep(86400)

def breaks(section):
    raise RuntimeError("no such kernel")

def wrong(section):
    section.fail(["two is three"])

def leaves(section):
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, held], stdin=subprocess.PIPE, start_new_session=True)
    held.write_text(str(80 << 30))

def sound(section):
    section.add(measure="figure", value=used())

running.import_module = lambda name: SimpleNamespace(measure=globals()[name.rpartition(".")[2]])
held.write_text("5")
memory = DeviceMemory(used)
runner = running.Runner("cpu", out / "scratch", running.Results(out, 1), time.monotonic() + 1e6, True, memory)
runner.scratch.mkdir()
for program, limit_s in (("hangs", 10), ("breaks", 600), ("wrong", 600), ("leaves", 600), ("sound", 600)):
    runner.run(Planned(program, limit_s))
"""


def test_a_section_that_hangs_or_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SECTIONS, tmp_path], cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "part1.jsonl").read_text().splitlines()]
    failures = {line["section"]: line["failure"] for line in lines if line["measure"] == "section"}
    assert failures == {
        "hangs": "cut after 10 s; what it had measured is kept",
        "breaks": "RuntimeError: no such kernel",
        "wrong": "1 wrong, the first: two is three",
        "leaves": "",
        "sound": "",
    }
    assert [line["section"] for line in lines if line["measure"] == "figure"] == ["hangs", "sound"]
    # The engine of an ended section returns its memory before the next section starts.
    assert [line["value"] for line in lines if line["section"] == "sound" and "value" in line] == [7]
    after = [line for line in lines if line["measure"] == "memory after"]
    assert [line["left_bytes"] for line in after] == [0, 0, 0, 2, 2]
    assert not any(line["failure"] for line in after)


def test_memory_that_stays_is_said_with_its_size() -> None:
    used = iter([100 << 20, 9 << 30, 8 << 30])
    memory = DeviceMemory(lambda: next(used))
    assert memory.wait(limit_s=0.0).left_bytes == (9 << 30) - (100 << 20)
    assert not memory.wait(limit_s=0.0).is_idle


@pytest.mark.parametrize(("answer", "expected"), [("echo 512; echo 3", 515 << 20), ("echo '[N/A]'", 0), ("exit 9", 0)])
def test_the_memory_of_all_gpus_is_added_up(
    answer: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert used_bytes() == expected


def test_no_part_starts_after_a_failed_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(self: Runner, planned: parts.Planned) -> bool:
        ran.append(planned.name)
        return planned.program == "smoke"

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(gpu, "_preloaded", lambda: False)
    command = ["gpu.py", "--part", "1", "2", "--device", "cuda", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit):
        gpu.main()
    assert ran == ["ceilings", "smoke-qwen2.5-0.5b"]


def test_wheels_are_unpacked_as_pip_would(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some-1-py3-none-any.whl", "w") as wheel:
        for name in ("some/code.py", "some-1.data/platlib/other/code.py", "some-1.data/scripts/run"):
            wheel.writestr(name, name)
    unpack(tmp_path, tmp_path / "unpacked")
    files = [file for file in (tmp_path / "unpacked").rglob("*") if file.is_file()]
    assert sorted(str(file.relative_to(tmp_path / "unpacked")) for file in files) == ["other/code.py", "some/code.py"]


def test_a_comparison_has_what_changed_and_what_is_alone() -> None:
    before = [{"section": "x", "case": "a", "us": 10.0, "same": 1.0}, {"section": "x", "case": "b", "us": 1.0}]
    after = [{"section": "x", "case": "a", "us": 5.0, "same": 1.01}, {"section": "y", "us": 1.0}]
    text = comparison(before, after)
    assert "1 figures changed by no more than 3%" in text
    assert "| x a | us | 10 | 5 | 0.50 |" in text
    assert "- only before: x b" in text and "- only after: y" in text


def test_what_is_carried_has_a_version_that_is_pinned() -> None:
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {name.lower() for name in MISSING} <= {name.replace("_", "-") for name in pinned} | pinned
