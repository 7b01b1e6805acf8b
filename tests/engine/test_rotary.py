"""Extended contexts: how long sequences may be, and that all of them are turned by the same frequencies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.rotation import Rotations
from tests.helpers.tiny_models import BASE, engine_tokens, expected_tokens, prompts, random_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

THETA = 1e4
HALF_DIM = 8
SHORT, LONG = [1.0 + 0.1 * i for i in range(HALF_DIM)], [3.0 + i for i in range(HALF_DIM)]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
HOW: dict[str, dict[str, Any]] = {"program": {}, "modules": {"enforce_eager": True}, "torch": {"kernels": "torch"}}


def config(kind: str, **changes: Any) -> tf.LlamaConfig:
    return tf.LlamaConfig(**BASE, rope_parameters={**ROPES[kind], "rope_theta": THETA, **changes})


def test_tables_are_computed_on_the_cpu() -> None:
    """Whatever precision a GPU's products have been given."""
    rotary = random_model(config("default")).model.rotary_emb
    expected = Rotations(rotary, 40, torch.device("cpu")).table(None, 2 * HALF_DIM)
    angles = torch.outer(torch.arange(40.0), rotary.inv_freq)
    assert torch.equal(expected, torch.cat((angles.cos(), angles.sin()), dim=-1))
    on_device = Rotations(rotary, 40, torch.device("meta")).table(None, 2 * HALF_DIM)  # which computes nothing
    assert on_device.device.type == "meta" and on_device.shape == expected.shape


def length(path: Path, model_config: Any, wanted: int | None = None) -> int:
    model_config.architectures = ["LlamaForCausalLM"]
    model_config.save_pretrained(path)
    options = EngineConfig(model=str(path), load_format="dummy", transport="inline", max_model_len=wanted)
    return load_model(options).max_model_len


@pytest.mark.parametrize(
    ("kind", "limit"), [("default", 64), ("linear", 256), ("dynamic", 256), ("yarn", 128), ("llama3", 64)]
)
def test_the_models_own_limit(kind: str, limit: int, tmp_path: Path) -> None:
    """The config's max_position_embeddings is 64."""
    assert length(tmp_path, config(kind)) == limit
    assert length(tmp_path, config(kind), limit - 1) == limit - 1
    with pytest.raises(ValueError, match=f"'max_model_len' is {limit + 1}, expected at most {limit}, the model's"):
        length(tmp_path, config(kind), limit + 1)


def test_gemma3_states_the_scaled_length(tmp_path: Path) -> None:
    gemma = tf.Gemma3TextConfig(**BASE, head_dim=16)
    gemma.rope_parameters["full_attention"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert length(tmp_path, gemma) == 64


def test_command_r_states_its_length_by_another_name(tmp_path: Path) -> None:
    """Beside a shorter max_position_embeddings."""
    assert length(tmp_path, tf.CohereConfig(**BASE, model_max_length=256)) == 256


def test_longrope_is_capped_unless_more_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "llmbackend.engine.model.rotary"):
        assert length(tmp_path, config("longrope")) == 16
    assert "max_model_len is limited to 16 of the model's 64 tokens" in caplog.text
    caplog.clear()
    assert length(tmp_path, config("longrope"), 64) == 64
    assert not caplog.text


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_tokens_of_scaled_frequencies(kind: str, tmp_path: Path) -> None:
    model = random_model(config(kind))
    model.save_pretrained(tmp_path)
    tokens, _ = engine_tokens(tmp_path, max_model_len=60)
    assert tokens == [expected_tokens(model, prompt) for prompt in prompts()]


@pytest.mark.parametrize("how", HOW)
def test_longrope_turns_short_and_long_sequences_alike(how: str, tmp_path: Path) -> None:
    """As transformers turns sequences beyond the original length, which are 16 tokens here."""
    model = random_model(config("longrope"))
    model.save_pretrained(tmp_path)
    always_long = random_model(config("longrope", short_factor=LONG))
    tokens, _ = engine_tokens(tmp_path, max_model_len=64, **HOW[how])
    assert tokens == [expected_tokens(always_long, prompt) for prompt in prompts()]
    beyond = [i for i, prompt in enumerate(prompts()) if len(prompt) > 16]
    assert [tokens[i] for i in beyond] == [expected_tokens(model, prompts()[i]) for i in beyond]
    always_short = random_model(config("longrope", long_factor=SHORT))
    assert tokens != [expected_tokens(always_short, prompt) for prompt in prompts()]


def test_dynamic_frequencies_are_those_of_the_longest_sequence(tmp_path: Path) -> None:
    """The same as transformers' for a sequence of that length; up to the original length, the original ones."""
    model = random_model(config("dynamic"))
    model.save_pretrained(tmp_path)
    rotary = model.model.rotary_emb
    original = rotary.inv_freq.clone()
    rotary(torch.empty(1), torch.arange(256)[None])
    options: dict[str, Any] = {"model": str(tmp_path), "transport": "inline"}
    for wanted, expected in ((None, rotary.inv_freq), (200, rotary.inv_freq), (64, original)):
        loaded = load_model(EngineConfig(**options, max_model_len=wanted))
        fixed = loaded.model.model.rotary_emb
        torch.testing.assert_close(fixed.inv_freq, expected)
        fixed(torch.empty(1), torch.arange(256)[None])
        fixed(torch.empty(1), torch.arange(5)[None])
        torch.testing.assert_close(fixed.inv_freq, expected, msg="a sequence changed them")
        if loaded.decoder is not None:
            cos_sin = loaded.decoder.layers[0].attending.cos_sin
            assert cos_sin is not None
            angles = torch.arange(len(cos_sin))[:, None] * expected[None]
            torch.testing.assert_close(cos_sin, torch.cat((angles.cos(), angles.sin()), dim=-1), atol=1e-5, rtol=0)
