"""`python -m trials.clients.vllm_suite SOURCE MODEL`: vLLM's own server tests against this server.

For people who change the OpenAI, Responses and Messages APIs or the flags of `vllm serve`. Independent of what the
tests check. SOURCE is vLLM's unpacked source package; MODEL is a real checkpoint with a chat template (`python -m
tools.real_models`), which replaces every model that the tests name. Also requires pytest-asyncio and regex. Invariants:
vLLM's files are copied, never changed; a test that fails for a reason of its own is in explained.toml. Answers are
sampled, so some of these tests pass in one run and fail in the next.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.helpers.server_process import ROOT

HERE: Final = Path(__file__).parent
FILES: Final = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_simple.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/instrumentator/test_orca_metrics.py",
    "serve/instrumentator/test_uds.py",
    "serve/tokenize/test_tokenization.py",
)
"""Below tests/entrypoints: those that start a server with a model of text, and ask it."""
_TIMEOUT_S: Final = 600


@dataclass
class Outcome:
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def run(file: str, directory: Path, model: Path) -> Outcome:
    report = directory / "report.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {"LLMBACKEND_SUITE_MODEL": str(model), "PYTHONPATH": f"{directory}:{ROOT}"}
    options = ["-c", os.devnull, f"--rootdir={directory}", f"--junitxml={report}", "-W", "ignore", "--timeout", "120"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", *options]
    target = f"tests/entrypoints/{file}"
    subprocess.run([*command, target], cwd=directory, env=environment, timeout=_TIMEOUT_S, check=False)
    outcome = Outcome()
    if not report.exists():
        outcome.failed[file] = "no report"
        return outcome
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{file}::{case.get('name')}"
        if (found := case.find("failure")) is not None or (found := case.find("error")) is not None:
            outcome.failed[name] = (found.get("message") or "")[:200]
        elif case.find("skipped") is not None:
            outcome.skipped.append(name)
        else:
            outcome.passed.append(name)
    return outcome


def prepare(source: Path, directory: Path) -> None:
    """vLLM's tests, with this folder's files in the place of what they have in common."""
    shutil.copytree(source / "tests" / "entrypoints", directory / "tests" / "entrypoints")
    (directory / "tests" / "__init__.py").touch()
    shutil.copy(HERE / "utils.py", directory / "tests" / "utils.py")
    shutil.copy(HERE / "conftest.py", directory / "conftest.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's own server tests against this server")
    parser.add_argument("source", type=Path, help="vLLM's unpacked source package")
    parser.add_argument("model", type=Path, help="a real checkpoint")
    parser.add_argument("--only", default="", help="files whose name holds this")
    options = parser.parse_args()
    explained: dict[str, str] = tomllib.loads((HERE / "explained.toml").read_text())["explained"]
    total = Outcome()
    with tempfile.TemporaryDirectory() as scratch:
        prepare(options.source, Path(scratch))
        for file in (file for file in FILES if options.only in file):
            outcome = run(file, Path(scratch), options.model.resolve())
            print(f"{file}: {len(outcome.passed)} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped")
            total.passed += outcome.passed
            total.skipped += outcome.skipped
            total.failed |= outcome.failed
    unexplained = {name: text for name, text in total.failed.items() if not _reason(name, explained)}
    for name, text in unexplained.items():
        print(f"FAILED {name}: {text}")
    known = len(total.failed) - len(unexplained)
    print(f"{len(total.passed)} passed, {len(total.failed)} failed ({known} explained), {len(total.skipped)} skipped")
    return 1 if unexplained else 0


def _reason(name: str, explained: dict[str, str]) -> str:
    """Parameters of a test need not be named."""
    return explained.get(name) or explained.get(name.partition("[")[0], "")


if __name__ == "__main__":
    sys.exit(main())
