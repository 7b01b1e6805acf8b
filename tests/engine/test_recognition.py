"""What modules compute is found by trying them, and what none of the known functions gives is refused by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import ProgramUnsupportedError
from llmbackend.engine.kernels import library
from llmbackend.engine.model import decoder_description, module_runner
from llmbackend.engine.model.loader import LoadedModel, load_model
from llmbackend.engine.model.recognition import norm_of, normalised, plain_activation_of
from tests.helpers.families import FAMILIES, save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

WIDTH = 40
BY_TYPE = {family.model_type: family for family in FAMILIES}


def spread(norm: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(WIDTH, eps=1e-3),
        nn.LayerNorm(WIDTH, bias=False),
        nn.RMSNorm(WIDTH, eps=1e-6),
        NemotronLayerNorm1P(WIDTH),
        OlmoLayerNorm(WIDTH),
        tf.models.gemma.modeling_gemma.GemmaRMSNorm(WIDTH),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms(norm: nn.Module) -> None:
    found, x = norm_of(spread(norm), WIDTH), 2 + torch.randn(5, WIDTH)
    assert torch.allclose(normalised(x, found), norm(x), atol=1e-5)
    assert torch.allclose(normalised(1e-3 * x, found), norm(1e-3 * x), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_in_16_bits(dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(WIDTH).to(dtype)
    found = norm_of(spread(norm), WIDTH)
    assert found.centred and torch.equal(found.weight, norm.weight.float())
    assert found.bias is not None and torch.equal(found.bias, norm.bias.float())


class Unknown(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6
        self.act_fn = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act_fn(x)


def test_other_functions_are_refused() -> None:
    with pytest.raises(ProgramUnsupportedError, match="Unknown is neither an RMS norm nor a layer norm"):
        norm_of(Unknown(torch.tanh), WIDTH)
    with pytest.raises(ProgramUnsupportedError, match="Unknown has the unsupported activation"):
        plain_activation_of(Unknown(torch.tanh))
    assert plain_activation_of(Unknown(lambda x: x.relu() ** 2)) == "relu2"


def loaded(path: Path, model_type: str, dense: bool = False, **changes: Any) -> LoadedModel:
    family = BY_TYPE[model_type]
    save_model(replace(family, changes=family.changes | changes), 64, path)
    return load_model(EngineConfig(model=str(path), transport="inline", num_threads=1, dtype="float32"), dense=dense)


def test_modules_are_as_before(tmp_path: Path) -> None:
    model = loaded(tmp_path, "llama").model
    assert not any("forward" in vars(module) for module in model.modules())


def test_queries_that_are_scaled_at_far_positions_alone(tmp_path: Path) -> None:
    rope = BY_TYPE["ministral3"].changes["rope_parameters"] | {"original_max_position_embeddings": 60}
    decoder = loaded(tmp_path, "ministral3", rope_parameters=rope).decoder
    assert decoder is not None
    rotation = decoder.layers[0].attending.rotation
    assert rotation.cos_sin is not None and rotation.q_cos_sin is not None
    assert torch.equal(rotation.q_cos_sin[:60], rotation.cos_sin[:60])
    assert torch.allclose(rotation.q_cos_sin[60:120], rotation.cos_sin[60:120] * (1 + 0.3 * math.log(2)))


def test_bounds_on_queries_show(tmp_path: Path) -> None:
    found = loaded(tmp_path, "olmo", clip_qkv=8.0)
    assert found.decoder is None and found.why_modules == "OlmoAttention rotates its heads in an unknown way"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("cohere", "its layer norms and its rotation of adjacent pairs and its parallel attention and MLP"),
        ("arcee", "its MLPs without a gate"),
        ("hunyuan_v1_dense", "its norms after the rotation"),
        ("ministral3", "its scaled queries"),
        ("olmo3", ""),
    ],
)
def test_what_an_accelerator_does_not_compute(model_type: str, reason: str, tmp_path: Path) -> None:
    found = loaded(tmp_path, model_type, dense=True)
    assert (found.decoder is None) == bool(reason)
    assert found.why_modules == (reason and f"{reason}: supported only by the CPU's program")


@pytest.mark.parametrize("eager", [False, True])
def test_any_error_in_a_description_is_a_reason(
    eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a warning in the log, unless modules were asked for."""
    save_model(BY_TYPE["llama"], 64, tmp_path)
    monkeypatch.setattr(decoder_description, "norm_of", lambda module, _width: module.of_no_such_name)
    config = EngineConfig(model=str(tmp_path), transport="inline", num_threads=1, enforce_eager=eager)
    with caplog.at_level(logging.INFO, module_runner.__name__):
        made = module_runner.make_model_runner(config)
    assert made.info.path == "modules"
    start = "enforce_eager is set" if eager else "its LlamaForCausalLM is not recognised (AttributeError: "
    assert made.info.path_reason.startswith(start)
    levels = [record.levelname for record in caplog.records if "runs as transformers modules" in record.message]
    assert levels == ["INFO" if eager else "WARNING"]
