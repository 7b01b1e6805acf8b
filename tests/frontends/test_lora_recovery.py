"""LoRA adapters at run time while things fail: an engine that dies (its successor has the same weights), a disk that
does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest

from llmbackend.adapter import model_state
from llmbackend.adapter.lora import AdapterCopies, LoraRegistry
from llmbackend.adapter.requests.conversion_pool import MAX_THREADS, SHORT_BYTES
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.protocol_options import ProtocolOptions
from tests.frontends.test_lora_at_run_time import MODEL, change, error_of, load, text_of
from tests.frontends.test_lora_clients import CHECKPOINT, PROMPT, write_adapter
from tests.frontends.test_openai_tools_recovery import children, engines
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.openai_live_server import openai_client, serve_openai
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

TOKENS = 120


@contextlib.contextmanager
def serving(root: Path) -> Iterator[tuple[InferenceServer, str]]:
    version = root / "models" / MODEL / "1"
    version.mkdir(parents=True)
    model = {"model": str(CHECKPOINT), "enable_lora": True, "num_kv_blocks": 64, "num_threads": 1}
    (version / "model.json").write_text(json.dumps({**model, "transport": "process"}))
    (version / "multi_lora.json").write_text("{}")
    (version.parent / "config.pbtxt").write_text('backend: "llm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    server = InferenceServer(ServerOptions(model_repositories=(root / "models",)))
    server.start()
    try:
        with serve_openai(server, options=ProtocolOptions(openai_lora_folder=str(root))) as base:
            yield server, f"{base}/v1"
    finally:
        assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def _client_has_been_used() -> None:
    """Its libraries open a pipe once and for all."""
    with openai_client(FakeLlmServer()) as client:
        assert [model.id for model in client.models.list()]


@pytest.mark.usefixtures("_client_has_been_used")
def test_a_request_ends_with_the_adapter_it_began_with_also_in_another_engine(tmp_path: Path) -> None:
    for seed, name in enumerate(("cat", "dog")):
        write_adapter(tmp_path / name, seed)
    with serving(tmp_path) as (server, url), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        load(url, "pet", "cat")
        cat = text_of(client, "pet", TOKENS)
        stream = client.completions.create(model="pet", prompt=PROMPT, temperature=0, max_tokens=TOKENS, stream=True)
        text = next(stream).choices[0].text
        load(url, "pet", "dog", load_inplace=True)
        os.kill(min(engines(children())), signal.SIGKILL)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == cat, "the rest is another adapter's"
        dog = text_of(client, "pet", TOKENS)
        assert dog != cat
        load(url, "dog", "dog")
        assert text_of(client, "dog", TOKENS) == dog
        assert change(url, "unload", lora_name="pet").status_code == 200
        labels = {"model": MODEL, "version": "1"}
        killed = server.metrics_registry.get_sample_value(
            "llmbackend:engine_restarts_total", {**labels, "cause": "killed"}
        )
        assert killed == 1, "the request was over before its engine died"


def test_a_disk_that_does_not_answer_holds_up_no_request_and_its_adapters_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, disk, num_begun = AdapterCopies.copy, threading.Event(), threading.Semaphore(0)

    def slow(copies: AdapterCopies, folder: str, path: str) -> str:
        num_begun.release()
        assert disk.wait(60)
        return copy(copies, folder, path)

    monkeypatch.setattr(AdapterCopies, "copy", slow)
    monkeypatch.setattr(model_state, "LoraRegistry", partial(LoraRegistry, load_timeout_s=3))
    write_adapter(tmp_path / "cat", 0)
    names = [f"cat{number}" for number in range(MAX_THREADS + 1)]
    with (
        serving(tmp_path) as (_, url),
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        answers = [pool.submit(change, url, "load", lora_name=name, lora_path="cat") for name in names]
        try:
            assert all(num_begun.acquire(timeout=20) for _ in names)
            with pytest.raises(openai.BadRequestError, match="context"):  # it is tokenised beside the instance's thread
                client.completions.create(model=MODEL, prompt="a cat " * SHORT_BYTES, max_tokens=1)
            for name, answer in zip(names, answers, strict=True):
                text = f"The lora adapter '{name}' was not loaded: 'cat' was not read within 3 s."
                assert error_of(answer.result(30)) == (503, text, None)
        finally:
            disk.set()
        eventually(lambda: not any(thread.name == "lora-read" for thread in threading.enumerate()))
        assert [model.id for model in client.models.list()] == [MODEL]
        load(url, names[0], "cat")
        assert text_of(client, names[0]) != text_of(client, MODEL)
