"""Models that are served by their text or attention part alone, and refusals and notes that say their reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.linear import NativeLinear
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.load_forecast import forecast
from llmbackend.engine.model.compatibility import auto_class
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.module_runner import make_model_runner
from tests.engine.test_decoder_program import greedy
from tests.helpers.gpu.int4_checkpoints import save_int4
from tests.helpers.recurrent_models import RECURRENT
from tests.helpers.tiny_models import BASE, engine_tokens, expected_tokens, prompts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

ATTENTION = {"layer_types": ["full_attention"] * 3}
VISION = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
SERVED: dict[str, Any] = {
    "Qwen2.5-VL": tf.Qwen2_5_VLConfig(
        text_config=BASE | {"rope_parameters": MROPE},
        vision_config=VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
    "Mistral 3": tf.Mistral3Config(
        text_config=tf.MistralConfig(**BASE),
        vision_config=tf.PixtralVisionConfig(**VISION, num_hidden_layers=1, num_attention_heads=2, image_size=28),
    ),
    "a hybrid with attention layers only": tf.Lfm2Config(**BASE, **ATTENTION),
}


WIDE = BASE | {"hidden_size": 256}
PIXELS = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
PROMPT = tuple((11 * i + 5) % 128 for i in range(40))
QWEN_VISION = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 256}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
NATIVE: dict[str, Any] = {
    "Gemma 3": tf.Gemma3Config(text_config=tf.Gemma3TextConfig(**WIDE, **MIXED, head_dim=64), vision_config=PIXELS),
    "InternVL": tf.InternVLConfig(text_config=tf.Qwen2Config(**WIDE), vision_config=PIXELS),
    "Mistral 3": tf.Mistral3Config(
        text_config=tf.MistralConfig(**WIDE), vision_config=tf.PixtralVisionConfig(**PIXELS)
    ),
    "Ministral 3": tf.Mistral3Config(
        text_config=tf.Ministral3Config(**WIDE, head_dim=64), vision_config=tf.PixtralVisionConfig(**PIXELS)
    ),
    "Qwen2.5-VL": tf.Qwen2_5_VLConfig(
        text_config=WIDE | {"rope_parameters": MROPE | {"mrope_section": [8, 12, 12]}}, vision_config=QWEN_VISION
    ),
    "Qwen3-VL": tf.Qwen3VLConfig(
        text_config=WIDE | {"head_dim": 64, "rope_parameters": MROPE | {"mrope_section": [12, 10, 10]}},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "SmolVLM": tf.SmolVLMConfig(text_config=tf.LlamaConfig(**WIDE), vision_config=PIXELS),
}

LAYOUTS: dict[str, Any] = {
    **{kind: NATIVE[kind] for kind in ("Gemma 3", "Mistral 3", "Qwen2.5-VL")},
    "Qwen3.5": tf.Qwen3_5Config(
        text_config=RECURRENT["qwen3_5"].to_dict(),
        vision_config=VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 128},
    ),
}


def random_model(config: Any) -> Any:
    torch.manual_seed(5)
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=1.0 if "emb" in name else 0.18)
    return model


@pytest.mark.parametrize("kind", SERVED)
def test_text_is_served(kind: str, tmp_path: Path) -> None:
    model = random_model(SERVED[kind])
    model.save_pretrained(tmp_path)
    tokens, _ = engine_tokens(tmp_path)
    assert [tokens[0], tokens[4]] == [expected_tokens(model, prompts()[i]) for i in (0, 4)]


@pytest.mark.skipif(not library.available(), reason="no native kernels are built here")
@pytest.mark.parametrize("kind", NATIVE)
def test_text_is_computed_natively(kind: str, tmp_path: Path) -> None:
    """With heads of a real size; the parts for images are not kept."""
    model = random_model(NATIVE[kind])
    model.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), transport="inline", dtype="float32")
    info = make_model_runner(config).info
    assert (info.path, info.path_reason, forecast(config).why_not_faster) == ("native", "", "")
    text = load_model(config).model
    assert not [name for name, _ in text.named_parameters() if "vision" in name or "visual" in name]
    tokens, _ = engine_tokens(tmp_path, dtype="float32")
    assert [tokens[0], tokens[4]] == [expected_tokens(model, prompts()[i]) for i in (0, 4)]


@pytest.mark.skipif(not library.available(), reason="no native kernels are built here")
@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, "awq") for kind in LAYOUTS] + [("Gemma 3", "compressed-tensors"), ("Qwen3.5", "gptq")],
)
def test_text_in_4_bits_is_that_of_the_plain_checkpoint(kind: str, method: str, tmp_path: Path) -> None:
    """Of checkpoints that also have parts for images."""
    save_int4(LAYOUTS[kind], tmp_path, method)
    path, plain = tmp_path / "int4", tmp_path / "plain"
    found, expected = (greedy(each, PROMPT, 8, dtype="float32") for each in (path, plain))
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-3)
    config = EngineConfig(model=str(path), transport="inline", dtype="float32", quantization="int4")
    assert forecast(config).why_not_faster == ""
    loaded = load_model(config)
    kinds = {each.packed.type for each in loaded.model.modules() if isinstance(each, NativeLinear)}
    assert Type.INT4_ZERO in kinds and loaded.decoder is not None
    kept = greedy(path, PROMPT, 1, dtype="float32", quantization="int4")[1]
    assert kept == pytest.approx(expected[1][:1], abs=0.25)


def test_an_encoder_is_refused_as_one(tmp_path: Path) -> None:
    tf.BertConfig(vocab_size=64, hidden_size=32, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'BertForMaskedLM' is not supported: it is an encoder"):
        load_model(EngineConfig(model=str(tmp_path), load_format="dummy", transport="inline"))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_plain_weights_under_a_label_are_noted(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tf.LlamaForCausalLM(tf.LlamaConfig(**BASE)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, "llmbackend.engine.model.loader"):
        assert load_model(EngineConfig(model=str(tmp_path), transport="inline")).dtype == torch.float32
    assert "states a quantization_config, but the weights are plain" in caplog.text


def test_float16_says_why_it_runs_as_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tf.LlamaConfig(**BASE).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "llmbackend.engine.model.module_runner"):
        make_model_runner(EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float16", transport="inline"))
    assert "runs as transformers modules: the native CPU kernels support float32 and bfloat16, not float16" in (
        caplog.text
    )
