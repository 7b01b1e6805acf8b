"""Whole models on the CPU's tile unit, or on one that is emulated: a request's tokens and logprobs depend on nothing
but the request, though rows of experts, heads and weights in 4 bits are multiplied by tiles or by vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmbackend.engine.cpu import native_runner
from llmbackend.engine.kernels.choice import Choice
from llmbackend.engine.kernels.library import NativeKernels
from llmbackend.engine.messages import InferRequest
from llmbackend.engine.model import loader
from tests.engine.test_decoder_program import save
from tests.engine.test_determinism import requests
from tests.engine.test_mixtures import families
from tests.engine.test_stored_mxfp4 import CONFIG
from tests.helpers.gpu.mxfp4_checkpoints import save_mxfp4
from tests.helpers.latent_models import latent_model
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.native_models import KINDS, core_of, linear_names, stories

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "on_tiles")]

CONDITIONS: dict[str, dict[str, Any]] = {
    "one token at a time": {"max_num_batched_tokens": 1},
    "chunks of a tile and a row": {"max_num_batched_tokens": 17},
    "two threads": {"num_threads": 2},
}
MODELS = [
    ("qwen3_moe", "bfloat16"),
    ("qwen3_moe", "int8"),
    ("qwen3_moe", "int4"),
    ("gpt_oss", "mxfp4"),
    ("deepseek_v3", "bfloat16"),
    ("deepseek_v3", "int8"),
]


@pytest.fixture
def on_tiles(tiles: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine has this library."""
    monkeypatch.setattr(loader, "choose_library", lambda weights: Choice(tiles.library, "of this test"))
    monkeypatch.setattr(native_runner, "load", lambda variant: tiles.library)


def some_requests(vocabulary: int) -> list[InferRequest]:
    """Prompts of 70, 3, 17 and 32 tokens."""
    found = []
    for request in (requests()[i] for i in (4, 1, 2, 5)):
        prompt = tuple(token % vocabulary for token in request.prompt_token_ids)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=6, logprob_token_ids=())
        found.append(msgspec.structs.replace(request, prompt_token_ids=prompt, sampling=sampling))
    return found


def save_model(family: str, folder: Path) -> Path:
    if family == "gpt_oss":
        save_mxfp4(CONFIG, folder)
        return folder / "mxfp4"
    if family == "deepseek_v3":
        latent_model(family).save_pretrained(folder)
    else:
        save(families(64)[family], folder)
    return folder


def stories_of(model: Path, wanted: list[InferRequest], **options: Any) -> dict[str, Any]:
    core = core_of(model, **options)
    assert core.info.path == "native"
    found = stories(core, wanted)
    core.close()
    return found


def check_law(model: Path, wanted: list[InferRequest], **options: Any) -> dict[str, Any]:
    together = stories_of(model, wanted, **options)
    alone = stories_of(model, wanted[:1], **options)
    assert alone == {name: together[name] for name in alone}
    for name, condition in CONDITIONS.items():
        assert stories_of(model, wanted, **options, **condition) == together, name
    return together


@pytest.mark.parametrize(("family", "kind"), MODELS)
def test_same_request_same_tokens(family: str, kind: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path)
    check_law(model, some_requests(128), **KINDS["int4" if kind == "mxfp4" else kind])


def test_adapters_beside_weights_of_4_bits(tmp_path: Path) -> None:
    oracle = save(families(64)["qwen3_moe"], tmp_path / "model")
    write_adapter(oracle, linear_names(oracle, "gate"), tmp_path / "adapter", 1)
    plain = some_requests(128)
    adapted = [
        msgspec.structs.replace(each, request_id=f"adapted {each.request_id}", lora_name="adapter") for each in plain
    ]
    options = {"enable_lora": True, "lora_modules": {"adapter": str(tmp_path / "adapter")}, **KINDS["int4"]}
    found = check_law(tmp_path / "model", plain + adapted, **options)
    assert all(found[each.request_id] != found[f"adapted {each.request_id}"] for each in plain)
