"""The first start in an environment that has only what `make serve` or the wheel installs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.server_process import ROOT
from tools.serving_packages import only_serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DEMO = ROOT / "model_repository" / "demo" / "1"


def check(target: Path) -> tuple[int, dict[str, object], str]:
    """Exit code, the one finding and the log of `llmbackend check`."""
    command = [sys.executable, "-m", "llmbackend.cli", "check", "--json", str(target)]
    done = subprocess.run(command, env=only_serving(), capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_packages_of_the_tests_are_hidden() -> None:
    program = "import importlib.util as i; print([bool(i.find_spec(n)) for n in ('accelerate', 'pytest', 'nicegui')])"
    shown = subprocess.run([sys.executable, "-c", program], env=only_serving(), capture_output=True, text=True)
    assert shown.stdout == "[False, False, True]\n", shown.stderr


def test_a_whole_checkpoint_is_checked_without_a_word_in_the_log() -> None:
    code, found, log = check(DEMO)
    assert (code, found["would_load"], found["warnings"], log) == (0, True, [], "")


def test_a_missing_weight_is_found_without_the_packages_of_the_tests(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    code, found, _ = check(tmp_path)
    assert (code, found["would_load"]) == (1, False)
    assert "missing: model.norm.weight" in json.dumps(found["reasons"])


def test_the_ready_block_says_what_computes_and_each_phase_is_logged(tmp_path: Path) -> None:
    """Standard error is no terminal here."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    cache = {"LLMBACKEND_WEIGHT_CACHE_DIR": str(tmp_path / "weights")}  # that of other tests may have the weights
    variables = {**only_serving(), **cache, "HOME": str(tmp_path), "NO_COLOR": "1"}
    with (tmp_path / "log").open("w+") as log:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=variables, text=True) as server:
            assert server.stdout is not None
            lines = [line.split() for line in iter(server.stdout.readline, "\n")]  # until the example
            server.terminate()
            server.stdout.read()
        assert server.returncode == 0
    assert ["model", "demo", "version", "1", "READY", "native"] in lines
    stages = re.findall(r'"demo: loading: ([a-z ]+[a-z])', (tmp_path / "log").read_text())
    assert {"importing torch", "reading weights", "packing weights"} <= set(stages)
