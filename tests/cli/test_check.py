"""`llmbackend check`: what would load, what would not and why, in the words of `serve`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_lines import CommandLine
from tests.helpers.server_process import ROOT, write_mock_model

pytestmark = pytest.mark.slow
DEMO = ROOT / "model_repository" / "demo"

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit code, standard output and standard error."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return lambda *arguments: (command_line.run("check", *arguments), *capsys.readouterr())


def test_what_to_check_must_be_said(check: Check) -> None:
    code, _, error = check()
    assert code == 2 and error.endswith("Missing argument 'target'.\n")


def test_what_to_check_must_exist(check: Check) -> None:
    code, _, error = check("/no/such/model")
    assert code == 2 and "the target is '/no/such/model', which does not exist" in error and "--model" not in error


def reason_of_serve(*arguments: str) -> str:
    """The last line of a server that does not start."""
    ports = [f"--allow-{protocol}=false" for protocol in ("grpc", "metrics")]
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *arguments, *ports]
    command += ["--http-port=0", "--http-address=127.0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_the_demo_model(check: Check) -> None:
    code, out, _ = check(str(DEMO))
    assert code == 0
    for text in ("demo version 1: would load", "native program on cpu, float32, 1 thread\n", "tool calls: hermes",
                 "1,024 tokens", "4.7 M parameters", "tokenizer.json", "max_tokens 256"):  # fmt: skip
        assert text in out
    code, out, _ = check(str(DEMO), "--json")
    [found] = map(json.loads, out.splitlines())
    assert (found["name"], found["version"], found["would_load"], found["warnings"]) == ("demo", 1, True, [])
    assert found["forecast"]["engine"]["path"] == "native program"
    assert found["forecast"]["tool_call_parser"] == "hermes"


def test_a_context_that_does_not_fit_the_kv_memory(check: Check) -> None:
    code, out, _ = check(str(DEMO / "1"), "--kv-cache-memory-bytes", "1M")
    assert code == 0 and "tokens, of the model's 1,024: more do not fit the KV memory" in out


def test_a_checkpoint_with_flags_of_serve(check: Check) -> None:
    code, out, _ = check(str(DEMO / "1"), "--dtype", "float16", "--max-num-seqs", "3", "--enable-lora")
    assert code == 0
    assert "transformers modules on cpu, float16" in out
    assert "no native program: the native CPU kernels support float32 and bfloat16, not float16" in out
    assert "3 at most" in out


def test_a_repository_with_broken_models(check: Check, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "good")
    write_mock_model(tmp_path, "misspelt", max_modl_len=3)
    write_mock_model(tmp_path, "foreign", swap_space=4)
    (tmp_path / "nothing" / "1").mkdir(parents=True)
    (tmp_path / "nothing" / "config.pbtxt").write_text('backend: "tensorrt"\n')
    (tmp_path / "syntax").mkdir()
    (tmp_path / "syntax" / "config.pbtxt").write_text('backend "llm"\n')
    ensemble = tmp_path / "ensemble"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text('platform: "ensemble" ensemble_scheduling { step { model_name: "gone" } }')
    code, out, _ = check(str(tmp_path), "--json")
    found: dict[str, Any] = {each["name"]: each for each in map(json.loads, out.splitlines())}
    assert code == 1
    assert {name for name, each in found.items() if each["would_load"]} == {"good", "foreign"}
    assert "unknown engine argument 'max_modl_len'" in found["misspelt"]["reasons"]["misspelt"]
    assert any("swap_space" in text for text in found["foreign"]["warnings"])
    assert "TensorRT" in found["nothing"]["reasons"]["nothing"]
    assert found["syntax"]["reasons"] and found["ensemble"]["reasons"]


def test_folders_that_cannot_be_read(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mock_model(tmp_path, "good")
    (tmp_path / "lost+found").mkdir()
    unreadable, iterdir = tmp_path / "lost+found", Path.iterdir

    def read(path: Path) -> Iterator[Path]:
        if path == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", read)
    code, out, _ = check(str(tmp_path), "--json")
    assert code == 0 and [json.loads(line)["name"] for line in out.splitlines()] == ["good"]
    code, _, error = check(str(unreadable))
    assert code == 2 and "which cannot be read: Permission denied" in error


@pytest.mark.parametrize("breakage", ["shard", "architecture"])
def test_the_reason_is_the_one_of_serve(check: Check, tmp_path: Path, breakage: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(DEMO / "1", checkpoint)
    if breakage == "shard":
        weights = (checkpoint / "model.safetensors").read_bytes()
        (checkpoint / "model.safetensors").write_bytes(weights[:-100])
        arguments = [f"--model-repository={tmp_path}"]
        (tmp_path / "broken" / "1").mkdir(parents=True)
        (tmp_path / "broken" / "config.pbtxt").write_text('backend: "llm"')
        (tmp_path / "broken" / "1" / "model.json").write_text(json.dumps({"model": str(checkpoint)}))
        target = str(tmp_path / "broken")
        arguments += ["--model-control-mode=explicit", "--load-model=broken"]
    else:
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(
            json.dumps(config | {"model_type": "bert", "architectures": ["BertModel"]})
        )
        arguments, target = [f"--model={checkpoint}"], str(checkpoint)
    code, out, _ = check(target)
    assert code == 1
    assert out.strip().splitlines()[-1] == reason_of_serve(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/no/such/model"], "'/no/such/model', which does not exist"),
        ([str(DEMO), "--dtype", "float16"], "--dtype is an engine argument of --model"),
        ([str(ROOT / "docs")], "holds no model"),
        ([str(DEMO / "1"), "--dtype", "float15"], "--dtype"),
    ],
)
def test_a_wrong_command_line_ends_with_the_reason(check: Check, arguments: list[str], expected: str) -> None:
    code, _, error = check(*arguments)
    assert code == 2
    assert expected in error
