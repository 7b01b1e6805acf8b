"""LoRA adapters loaded and unloaded over HTTP while the bundled model serves: by operators, below one folder."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file

from llmbackend.adapter.lora import AdapterCopies
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.protocol_options import ProtocolOptions
from tests.frontends.test_lora_clients import CHECKPOINT, PROMPT, write_adapter
from tests.helpers.core_host import send
from tests.helpers.openai_live_server import serve_openai

pytestmark = pytest.mark.slow

MODEL = "stories"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("cat", "deep/dog")):
        write_adapter(root / "ours" / name, seed)
    write_adapter(root / "outside", 7)
    (root / "ours" / "link").symlink_to(root / "outside")
    shutil.copytree(root / "ours" / "cat", root / "ours" / "linked")
    (root / "ours" / "linked" / "adapter_model.safetensors").unlink()
    (root / "ours" / "linked" / "adapter_model.safetensors").symlink_to(root / "outside" / "adapter_model.safetensors")
    shutil.copytree(root / "ours" / "cat", root / "ours" / "broken")
    (root / "ours" / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    (root / "ours" / "empty").mkdir()
    write_adapter(root / "ours" / "other", 3)
    tensors = load_file(root / "ours" / "other" / "adapter_model.safetensors")
    renamed = {name.replace("o_proj", "q"): tensor for name, tensor in tensors.items()}
    save_file(renamed, root / "ours" / "other" / "adapter_model.safetensors")
    return root / "ours"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    repository = tmp_path_factory.mktemp("repository")
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    model = {"model": str(CHECKPOINT), "enable_lora": True, "num_kv_blocks": 64, "num_threads": 1}
    (version / "model.json").write_text(json.dumps({**model, "transport": "inline", "enable_prefix_caching": True}))
    (version / "multi_lora.json").write_text("{}")
    (version.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n')
    server = InferenceServer(ServerOptions(model_repositories=(repository,)))
    server.start()
    yield server
    assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def url(server: InferenceServer, folder: Path) -> Iterator[str]:
    with serve_openai(server, options=ProtocolOptions(openai_lora_folder=str(folder))) as base:
        load(f"{base}/v1", "first", "cat")  # the model's timer starts with it, and stays
        assert change(f"{base}/v1", "unload", lora_name="first").status_code == 200
        yield f"{base}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def no_adapter_is_left(url: str, client: openai.OpenAI) -> Iterator[None]:
    yield
    for model in client.models.list():
        if model.id != MODEL:
            assert change(url, "unload", lora_name=model.id).status_code == 200
    assert [model.id for model in client.models.list()] == [MODEL]


def change(url: str, action: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/{action}_lora_adapter", json=body)


def load(url: str, name: str, path: str, **body: Any) -> None:
    answer = change(url, "load", lora_name=name, lora_path=path, **body)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")


def text_of(client: openai.OpenAI, model: str, max_tokens: int = 12) -> str:
    answer = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=max_tokens)
    return answer.choices[0].text


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["message"], error["param"]


def test_a_loaded_adapter_is_a_model_until_it_is_unloaded(url: str, client: openai.OpenAI, folder: Path) -> None:
    plain = text_of(client, MODEL)
    load(url, "cat", "cat")
    load(url, "dog", str(folder / "deep" / "dog"))
    texts = {name: text_of(client, name) for name in ("cat", "dog", MODEL)}
    assert texts[MODEL] == plain and len(set(texts.values())) == 3
    listed = {model.id: (model.root, model.parent) for model in client.models.list()}  # type: ignore[attr-defined]
    assert listed == {MODEL: (MODEL, None), "cat": (MODEL, MODEL), "dog": (MODEL, MODEL)}
    assert client.models.retrieve("cat").id == "cat"
    answer = change(url, "unload", lora_name="cat")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'cat' removed successfully.")
    with pytest.raises(openai.NotFoundError, match="'cat' does not exist"):
        text_of(client, "cat")
    assert text_of(client, "dog") == texts["dog"] and text_of(client, MODEL) == plain


def test_an_adapter_is_replaced_in_place_and_cached_prefixes_with_it(url: str, client: openai.OpenAI) -> None:
    load(url, "pet", "cat")
    cat = text_of(client, "pet")
    assert error_of(change(url, "load", lora_name="pet", lora_path="deep/dog")) == (
        400,
        "The lora adapter 'pet' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True.",
        None,
    )
    load(url, "pet", "deep/dog", load_inplace=True)
    load(url, "dog", "deep/dog")
    assert text_of(client, "pet") == text_of(client, "dog") != cat


def test_running_requests_keep_their_adapter(url: str, client: openai.OpenAI) -> None:
    load(url, "pet", "cat")
    expected = text_of(client, "pet", 60)
    with client.completions.create(model="pet", prompt=PROMPT, temperature=0, max_tokens=60, stream=True) as stream:
        chunks = iter(stream)
        text = next(chunks).choices[0].text
        load(url, "pet", "deep/dog", load_inplace=True)
        change(url, "unload", lora_name="pet")
        text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == expected


def test_a_parameter_changes_no_adapter(server: InferenceServer, client: openai.OpenAI, folder: Path) -> None:
    """Its name may be a client's, through a model that passes parameters on."""
    command = json.dumps({"action": "load", "name": "cat", "folder": str(folder), "path": "cat"})
    text = Tensor.text("text_input", PROMPT.encode())
    answer = send(server, MODEL, text, parameters={"triton_lora_change": command}).responses()[-1]
    assert answer.error is None and answer.outputs[0].name == "text_output"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_changed_file_changes_no_loaded_adapter(url: str, client: openai.OpenAI, folder: Path) -> None:
    shutil.copytree(folder / "cat", folder / "passing")
    load(url, "pet", "passing")
    expected = text_of(client, "pet")
    shutil.rmtree(folder / "passing")
    assert text_of(client, "pet") == expected


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("../outside", 400, "expected a folder below the server's LoRA folder"),
        ("/etc", 400, "expected a folder below the server's LoRA folder"),
        (".", 400, "expected a folder below the server's LoRA folder"),
        ("link", 400, "without symbolic links"),
        ("linked", 400, "without symbolic links"),
        ("nowhere", 404, "No adapter found for 'nowhere'"),
        ("empty", 404, "No adapter found for 'empty': it has no 'adapter_config.json'"),
        ("broken", 400, "LoRA adapter 'broken': 'adapter_model.safetensors' is not an adapter's file: its header has "),
        ("other", 400, "LoRA adapter 'x' changes 'model.layers.0.self_attn.q', expected linear layers of the decoder"),
    ],
)
def test_what_cannot_be_loaded(url: str, path: str, status: int, told: str) -> None:
    answer = change(url, "load", lora_name="x", lora_path=path)
    error = answer.json()["error"]
    assert answer.status_code == status and told in error["message"], answer.text
    assert error["param"] == ("lora_path" if status == 400 else None)
    assert error_of(change(url, "unload", lora_name="x"))[0] == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "cat"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "cat"}, "lora_name"),
        ({"lora_name": "a,b", "lora_path": "cat"}, "lora_name"),
        ({"lora_name": MODEL, "lora_path": "cat"}, "lora_name"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path"),
        ({"lora_name": "a", "lora_path": "cat", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": "a", "lora_path": "cat", "more": 1}, "more"),
    ],
    ids=str,
)
def test_wrong_bodies_are_refused_by_field(url: str, body: dict[str, Any], param: str) -> None:
    status, _, found = error_of(change(url, "load", **body))
    assert (status, found) == (400, param)


def test_without_a_folder_there_is_no_such_path(server: InferenceServer) -> None:
    with serve_openai(server) as base:
        status, text, _ = error_of(change(f"{base}/v1", "load", lora_name="a", lora_path="cat"))
    assert status == 404 and "--lora-folder" in text


def test_a_change_waits_for_no_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that hangs, on a disk that does not answer, holds up neither other loads nor unloads."""
    copy, gate, begun = AdapterCopies.copy, threading.Event(), threading.Event()

    def slow(copies: AdapterCopies, folder: str, path: str) -> str:
        if path == "cat":
            begun.set()
            assert gate.wait(20)
        return copy(copies, folder, path)

    monkeypatch.setattr(AdapterCopies, "copy", slow)
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(load, url, "cat", "cat")
        assert begun.wait(20)
        try:
            load(url, "dog", "deep/dog")
            assert change(url, "unload", lora_name="dog").status_code == 200
            again = change(url, "load", lora_name="cat", lora_path="cat")
            assert again.status_code == 400 and "'cat' is being loaded" in again.text
        finally:
            gate.set()
        hanging.result()
