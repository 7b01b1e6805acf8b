"""A server of a GGUF file answers with the tokens of the model that the file was converted from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gguf.test_families import CONFIGS
from tests.helpers.gguf_files import write_model
from tests.helpers.server_process import ROOT, ServerProcess, post, start_server, stop_server
from tests.helpers.tiny_models import random_model

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT, PROMPT_TOKENS, NUM_TOKENS = "ababab", [2, 2, 2], 12


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in parts, in the version directory of a repository's model."""
    folder = tmp_path_factory.mktemp("gguf") / "repository" / "tiny" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text('backend: "llm"\n')
    extra = {"tokenizer.chat_template": TEMPLATE}
    write_model(folder / "tiny.gguf", random_model(CONFIGS["llama"]), extra=extra, shards=10)
    return folder


@pytest.fixture(scope="module")
def expected() -> list[int]:
    model = random_model(CONFIGS["llama"])
    ids = torch.tensor([PROMPT_TOKENS])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in output[0, len(PROMPT_TOKENS) :]]


@pytest.fixture(scope="module", params=["file", "repository"])
def server(request: pytest.FixtureRequest, files: Path) -> Iterator[ServerProcess]:
    if request.param == "file":
        first = min(files.glob("*.gguf"))
        server = start_server("--model", str(first), "--served-model-name", "tiny")
    else:
        server = start_server("--model-repository", str(files.parent.parent))
    yield server
    stop_server(server)


def test_prompts_and_chats_are_answered(server: ServerProcess, expected: list[int]) -> None:
    options = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    status, text = post(server, "/v1/completions", {**options, "prompt": PROMPT})
    assert status == 200, text
    choice: dict[str, Any] = json.loads(text)["choices"][0]
    assert choice["token_ids"] == expected
    status, text = post(server, "/v1/chat/completions", {**options, "messages": [{"role": "user", "content": PROMPT}]})
    assert status == 200, text
    assert json.loads(text)["choices"][0]["message"]["content"] == choice["text"]


def test_check_and_bench_take_the_file(files: Path, tmp_path: Path) -> None:
    first = min(files.glob("*.gguf"))
    (tmp_path / "work.json").write_text('[{"prompt_tokens": 3, "output_tokens": 2}]')
    command = [sys.executable, "-m", "llmbackend.cli"]
    check = subprocess.run([*command, "check", "--json", str(first)], capture_output=True, text=True, cwd=ROOT)
    found = json.loads(check.stdout)
    assert check.returncode == 0, check.stdout
    assert found["name"] == "tiny"
    assert found["forecast"]["engine"]["architecture"] == "LlamaForCausalLM"
    bench = [*command, "bench", "--model", str(first), "--workload", str(tmp_path / "work.json")]
    done = subprocess.run(bench, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"on{first}" in "".join(done.stdout.split())  # lines may be broken anywhere
