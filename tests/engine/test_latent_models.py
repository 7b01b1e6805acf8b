"""Models with multi-head latent attention: transformers' tokens, and the first law where heads share what is kept.

A request's tokens and logprobs depend on nothing but the request: not on its neighbours, chunks, preemption, cached
prefixes, drafts or threads, though few heads' and many heads' rows are multiplied in different tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.operations import Role
from llmbackend.engine.kernels import library
from llmbackend.engine.load_forecast import forecast
from llmbackend.engine.messages import InferRequest
from tests.engine.test_determinism import SPECULATION
from tests.helpers.latent_models import LATENT, latent_model
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.native_models import (
    KINDS,
    check_same_tokens,
    core_of,
    generated,
    greedy,
    linear_names,
    profiled_roles,
    stories,
    tokens_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

NIGHTLY = pytest.mark.nightly
CONDITIONS: dict[str, dict[str, Any]] = {
    "small chunks, preemption": {"max_num_batched_tokens": 17, "num_kv_blocks": 9},
    "no prefix cache": {"enable_prefix_caching": False},
    "one token of a prompt at a time": {"max_num_batched_tokens": 1},
    "large chunks": {"max_num_batched_tokens": 4096},
    "few rows": {"max_num_seqs": 3},
    "larger blocks": {"block_size": 64},
    "three threads": {"num_threads": 3, "max_num_batched_tokens": 50},
    "speculation, preemption": {"speculative_config": SPECULATION, "max_num_batched_tokens": 17, "num_kv_blocks": 9},
}
INDEXER = ("wq_b", "wk", "weights_proj")
"""What chooses positions, of which all are read."""
change = msgspec.structs.replace


@pytest.fixture(scope="module", params=LATENT)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(family)
    latent_model(family).save_pretrained(path)
    return path


def random_requests(lengths: tuple[int, ...]) -> list[InferRequest]:
    draw = torch.Generator().manual_seed(3)
    return greedy([torch.randint(0, 500, (length,), generator=draw).tolist() for length in lengths])


def test_tokens_are_those_of_transformers(family: str, model: Path) -> None:
    wanted = random_requests((13, 1, 70, 32, 150))
    core = core_of(model, dtype="float32", max_num_batched_tokens=48)
    found, info = stories(core, wanted), core.info
    core.close()
    assert (info.path, info.path_reason) == ("native", "")
    config = LATENT[family]
    assert info.kv_bytes_per_token == 4 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    oracle = latent_model(family)
    for request in wanted:
        assert tokens_of(found[request.request_id]) == generated(oracle, request.prompt_token_ids)
    assert len({token for story in found.values() for token in tokens_of(story)}) > 10, "degenerate output"


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NIGHTLY if kind != "bfloat16" else ()) for kind in KINDS])
def test_same_request_same_tokens(kind: str, model: Path) -> None:
    check_same_tokens(model, KINDS[kind], CONDITIONS, num_threads=2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_is_verified_in_every_type(kind: str, model: Path) -> None:
    core = core_of(model, **KINDS[kind])
    assert (core.info.path, core.info.path_reason) == ("native", "")
    core.close()


def test_the_forecast_is_what_the_engine_has(model: Path) -> None:
    for options in KINDS.values():
        config = EngineConfig(model=str(model), num_kv_blocks=32, **options)
        found, core = forecast(config), core_of(model, **options)
        assert (found.path, found.why_not_faster) == ("native program", "")
        assert found.kv_bytes_per_token == core.info.kv_bytes_per_token
        assert found.kv_bytes == core.info.kv_bytes
        assert found.weight_bytes == pytest.approx(core.info.weight_bytes, rel=0.02)
        core.close()


def test_adapters_change_linear_layers(family: str, model: Path, tmp_path: Path) -> None:
    oracle, wanted = latent_model(family), random_requests((70, 9))
    names = linear_names(oracle, "kv_b_proj", *INDEXER)
    merged = write_adapter(oracle, names, tmp_path / "adapter", 1, r=2, lora_alpha=1)
    core = core_of(model, enable_lora=True, lora_modules={"adapter": str(tmp_path / "adapter")})
    adapted = [change(each, request_id=f"adapted {each.request_id}", lora_name="adapter") for each in wanted]
    found, path = stories(core, wanted + adapted), core.info.path
    core.close()
    assert path == "native"
    for request in wanted:
        assert tokens_of(found[request.request_id]) == generated(oracle, request.prompt_token_ids)
        assert tokens_of(found[f"adapted {request.request_id}"]) == generated(merged, request.prompt_token_ids)


def test_an_adapter_of_what_is_multiplied_the_other_way_round_is_refused(
    family: str, model: Path, tmp_path: Path
) -> None:
    write_adapter(latent_model(family), ["kv_b_proj"], tmp_path / "adapter", 1)
    with pytest.raises(ValueError, match=r"'adapter' changes 'model\.layers\.0\.self_attn\.kv_b_proj'"):
        core_of(model, enable_lora=True, lora_modules={"adapter": str(tmp_path / "adapter")})


def test_the_profile_has_a_row_for_latents(model: Path) -> None:
    for roles in profiled_roles(model):
        assert Role.LATENT in roles
