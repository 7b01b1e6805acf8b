"""Completion in shells: the script of `--show-completion` in a real bash, and what it completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.server_process import ROOT

pytestmark = pytest.mark.slow
COMMAND = """
source <(llmbackend --show-completion)
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_llmbackend_completion llmbackend && printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    program = folder / "llmbackend"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llmbackend.cli "$@"\n')
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "--norc", "-c", COMMAND, "bash", "llmbackend", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ser"], ["serve"]),
        (["serve", "--http-p"], ["--http-port"]),
        (["serve", "--model-repository", "/models", "--dtype", "f"], ["float32", "float16"]),
        (["serve", "--allow-grpc", "=", "f"], ["false"]),
        (["serve", "--model-control-mode", ""], ["none", "poll", "explicit"]),
        (["chat", "--max"], ["--max-tokens"]),
        (["serve", "--model-repository", ""], []),  # bash then offers files
    ],
)
def test_bash_completes_subcommands_flags_and_values(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    assert completed(tmp_path, *words) == expected
