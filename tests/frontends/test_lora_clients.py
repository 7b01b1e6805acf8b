"""vllm_backend's multi-LoRA repository, served unchanged: adapters by `lora_name` and, over OpenAI, as models."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.protocol_options import ProtocolOptions
from tests.helpers.kserve_runner import Running
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "demo" / "1"
PROMPT = "Once upon a time"
WIDTH, NUM_LAYERS = 256, 4


def write_adapter(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(2, WIDTH, generator=draw) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(WIDTH, 2, generator=draw) / 4
    save_file(tensors, folder / "adapter_model.safetensors")


def start(root: Path, **options: Any) -> InferenceServer:
    version = root / "stories" / "1"
    for seed, name in enumerate(("doll", "sheep")):
        write_adapter(version / "weights" / name, seed)
    model = {"model": str(CHECKPOINT), "enable_lora": "true", "max_lora_rank": 8, "num_kv_blocks": 64}
    (version / "model.json").write_text(json.dumps({**model, "transport": "inline", "num_threads": 1}))
    (version / "multi_lora.json").write_text(json.dumps({"doll": "weights/doll", "sheep": "weights/sheep"}))
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    server = InferenceServer(ServerOptions(model_repositories=(root,), **options))
    server.start()
    return server


HOST_OPTIONS = {"start": start, "protocols": ProtocolOptions(openai_lora_separator="_lora_")}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{running.http}/v1", api_key="x", max_retries=0) as client:
        yield client


def generate(running: Running, **parameters: Any) -> httpx.Response:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "parameters": parameters}
    return httpx.post(f"http://{running.http}/v2/models/stories/generate", json=body)


def test_adapters_by_name_over_tensors_and_as_openai_models(running: Running, client: openai.OpenAI) -> None:
    texts = {}
    for name in ("", "doll", "sheep"):
        answer = generate(running, temperature=0, max_tokens=12, **({"lora_name": name} if name else {}))
        texts[name] = answer.json()["text_output"]
    assert len(set(texts.values())) == 3, "the adapters change nothing"
    assert [model.id for model in client.models.list()] == ["stories", "stories_lora_doll", "stories_lora_sheep"]
    for name, text in texts.items():
        model = f"stories_lora_{name}" if name else "stories"
        whole = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=12)
        assert (whole.model, whole.choices[0].text) == (model, text)
        chunks = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=12, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_routers_see_which_adapters_have_requests(running: Running) -> None:
    """As the endpoint picker of the Gateway API inference extension reads it, while streams begin and end."""
    seen: set[tuple[str, str]] = set()

    def adapters() -> tuple[str, str] | None:
        """None before the engine's first report."""
        page = httpx.get(f"http://{running.http}/metrics").text
        [family] = [one for one in text_string_to_metric_families(page) if one.name == "vllm:lora_requests_info"]
        if not family.samples:
            return None
        [sample] = family.samples
        seen.add((sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]))
        return sample.labels["running_lora_adapters"], sample.labels["max_lora"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(generate, running, lora_name="doll", max_tokens=60, ignore_eos=True) for _ in range(64)]
        while not all(answer.done() for answer in answers):
            adapters()
    assert all(answer.result().status_code == 200 for answer in answers)
    eventually(lambda: adapters() == ("", "8"), 10)
    assert {running for running, _ in seen} == {"", "doll"}


def start_with_named_adapters(root: Path, **options: Any) -> InferenceServer:
    """As `serve --lora-modules one=DIR` writes it."""
    write_adapter(root / "adapter", 1)
    version = root / "models" / "stories" / "1"
    version.mkdir(parents=True)
    model = {"model": str(CHECKPOINT), "enable_lora": True, "lora_modules": {"one": str(root / "adapter")}}
    (version / "model.json").write_text(json.dumps({**model, "transport": "inline", "num_threads": 1}))
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    server = InferenceServer(ServerOptions(model_repositories=(root / "models",), **options))
    server.start()
    return server


@pytest.mark.parametrize("separator", ["", "_lora_"])
def test_an_adapter_of_lora_modules_is_a_model_by_its_name(tmp_path: Path, separator: str) -> None:
    protocols = ProtocolOptions(openai_lora_separator=separator)
    with (
        Running(tmp_path, start=start_with_named_adapters, protocols=protocols) as running,
        openai.OpenAI(base_url=f"http://{running.http}/v1", api_key="x", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["stories", "one"]
        assert client.models.retrieve("one").model_dump()["parent"] == "stories"
        texts = [
            client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=12).choices[0].text
            for name in ("stories", "one")
        ]
        assert texts[1] == generate(running, temperature=0, max_tokens=12, lora_name="one").json()["text_output"]
        assert texts[0] != texts[1]


def test_an_unknown_adapter_is_refused_by_name(running: Running, client: openai.OpenAI) -> None:
    refused = generate(running, lora_name="cow")
    assert refused.status_code == 400
    assert refused.json()["error"] == "LoRA cow is not supported, we currently support ['doll', 'sheep']"
    with pytest.raises(openai.BadRequestError, match="Unknown LoRA: cow; for model: stories"):
        client.completions.create(model="stories_lora_cow", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="Unknown LoRA: cow; for model: stories"):
        client.models.retrieve("stories_lora_cow")
