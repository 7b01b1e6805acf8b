"""Which models run as one native program, and that it computes what their modules compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.linear import swap_linears
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model import loader
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.step import Runner
from tests.engine.test_native_linear_int4 import rounded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
PROGRAMS: dict[str, Any] = {
    "llama": tf.LlamaConfig(**SIZES),
    "qwen2": tf.Qwen2Config(**SIZES),
    "qwen3": tf.Qwen3Config(**SIZES, head_dim=32),
    "mistral": tf.MistralConfig(**SIZES, sliding_window=8),
    "gemma2": tf.Gemma2Config(**SIZES, head_dim=32, sliding_window=8, attn_logit_softcapping=2.0),
    "gemma3": tf.Gemma3TextConfig(**SIZES, **MIXED, head_dim=32),
    "phi3": tf.Phi3Config(**SIZES),
    "olmo2": tf.Olmo2Config(**SIZES),
    "granite": tf.GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.7),
    "smollm3": tf.SmolLM3Config(**SIZES),
    "qwen3_moe": tf.Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
MODULES: dict[str, Any] = {
    "gpt_neox": tf.GPTNeoXConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"}),
    "head_dim 24": tf.Qwen3Config(**SIZES, head_dim=24),
}


def save(config: Any, path: Path) -> Any:
    """A random model with weights spread wide enough that greedy output does not repeat one token."""
    torch.manual_seed(5)
    # Eager, because other implementations leave out the logits' soft cap.
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    model.save_pretrained(path)
    return model


def runner(path: Path, **options: Any) -> Runner:
    return make_model_runner(
        EngineConfig(model=str(path), transport="inline", num_threads=1, num_kv_blocks=8, **options)
    )


def greedy(path: Path, prompt: tuple[int, ...], count: int, **options: Any) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs, the prompt in chunks of 7."""
    config = EngineConfig(
        model=str(path), transport="inline", num_threads=1, num_kv_blocks=8, max_num_batched_tokens=7, **options
    )
    core = EngineCore(config, make_model_runner(config))
    core.add(
        InferRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0),
        )
    )
    chosen = []
    while core.has_work:
        chosen += [entry for output in core.step().outputs for entry in output.logprobs]
    core.close()
    return [entry.token_id for entry in chosen], [entry.logprob for entry in chosen]


@pytest.mark.parametrize("family", PROGRAMS)
def test_a_program_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = save(PROGRAMS[family], tmp_path)
    assert runner(tmp_path).info.description.endswith("one native program")
    prompt = tuple((7 * i + 3) % 128 for i in range(40))
    tokens, logprobs = greedy(tmp_path, prompt, 12)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, -1).max(-1).values
    assert torch.allclose(torch.tensor(logprobs), expected, atol=2e-4)


@pytest.mark.parametrize("family", MODULES)
def test_other_models_run_as_modules_on_native_layers(family: str, tmp_path: Path) -> None:
    model = save(MODULES[family], tmp_path)
    assert runner(tmp_path).info.description.endswith("modules")
    prompt = tuple(range(1, 21))
    tokens, _ = greedy(tmp_path, prompt, 8)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def test_what_a_description_misses_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(PROGRAMS["llama"], tmp_path)
    layer = tf.models.llama.modeling_llama.LlamaDecoderLayer
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.1)
    assert runner(tmp_path).info.description.endswith("modules")


def test_the_program_is_an_option(tmp_path: Path) -> None:
    save(PROGRAMS["qwen2"], tmp_path)
    assert runner(tmp_path, enforce_eager=True).info.description.endswith("modules")
    assert "packed float32" in runner(tmp_path, kernels="torch").info.description
    for quantization in ("int8", "int4"):
        assert quantization in runner(tmp_path, quantization=quantization).info.description
    with pytest.raises(ValueError, match="'quantization' is 'int8', which needs the native CPU kernels"):
        runner(tmp_path, quantization="int8", kernels="torch")


def test_bfloat16_lies_close_to_float32(tmp_path: Path) -> None:
    """Weights are the same numbers; what differs is KV memory of 8 bits of mantissa, and on tiles the activations."""
    config = PROGRAMS["qwen2"]
    torch.manual_seed(5)
    tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    prompt = tuple((11 * i + 5) % 128 for i in range(60))
    wide, narrow = (greedy(tmp_path, prompt, 1, dtype=dtype)[1][0] for dtype in ("float32", "bfloat16"))
    assert narrow == pytest.approx(wide, abs=0.02)


OUTLIER = 64.0


def with_outliers(model: Any) -> Any:
    """The same function with activations like those of real models: one channel of the inputs of linear layers
    is 64 times larger, and its weights are as much smaller."""
    with torch.no_grad():
        for layer in model.model.layers:
            mlp, attention = layer.mlp, layer.self_attn
            scale_norm(layer.input_layernorm, 3, (attention.q_proj, attention.k_proj, attention.v_proj))
            before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
            scale_norm(before_mlp, 77, (mlp.gate_proj, mlp.up_proj))
            mlp.up_proj.weight[50] *= OUTLIER
            mlp.down_proj.weight[:, 50] /= OUTLIER
    return model


def scale_norm(norm: Any, channel: int, linears: Sequence[Any]) -> None:
    offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    norm.weight[channel] = (norm.weight[channel] + offset) * OUTLIER - offset
    for linear in linears:
        linear.weight[:, channel] /= OUTLIER


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_int8_programs_of_models_with_outliers(family: str, dtype: str, tmp_path: Path) -> None:
    model = with_outliers(save(PROGRAMS[family], tmp_path))
    model.save_pretrained(tmp_path)
    made = runner(tmp_path, dtype=dtype, quantization="int8")
    assert "int8" in made.info.description and "modules" not in made.info.description
    prompt = tuple((11 * i + 5) % 128 for i in range(60))
    exact, int8 = (greedy(tmp_path, prompt, 1, dtype="float32", quantization=kind)[1][0] for kind in (None, "int8"))
    assert int8 == pytest.approx(exact, abs=0.25)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_int4_programs_compute_what_modules_with_rounded_weights_do(family: str, dtype: str, tmp_path: Path) -> None:
    """The output head's weights stay in 8 bits."""
    model = with_outliers(save(PROGRAMS[family], tmp_path / "own"))
    model.save_pretrained(tmp_path / "own")
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is torch.nn.Linear and module is not head:
            module.weight.data = in_four_bits(module.weight.data)
    model.save_pretrained(tmp_path / "rounded")
    made = runner(tmp_path / "own", dtype=dtype, quantization="int4")
    assert "int4" in made.info.description and "modules" not in made.info.description
    prompt = tuple((11 * i + 5) % 128 for i in range(60))
    int4 = greedy(tmp_path / "own", prompt, 1, dtype="float32", quantization="int4")[1][0]
    exact = greedy(tmp_path / "rounded", prompt, 1, dtype="float32")[1][0]
    assert int4 == pytest.approx(exact, abs=0.25)


@pytest.mark.parametrize(("num_kv_heads", "expected"), [(4, Type.INT4_MIN), (2, Type.INT8), (1, Type.INT8)])
def test_values_that_queries_share_have_8_bits(num_kv_heads: int, expected: Type, tmp_path: Path) -> None:
    config = tf.LlamaConfig(**SIZES | {"num_attention_heads": 4, "num_key_value_heads": num_kv_heads})
    save(config, tmp_path)
    made = loader.load_model(EngineConfig(model=str(tmp_path), transport="inline", quantization="int4"))
    attention: Any = made.model.model.layers[0].self_attn
    assert attention.v_proj.packed.type is expected
    assert attention.q_proj.packed.type is attention.k_proj.packed.type is Type.INT4_MIN


def in_four_bits(weight: torch.Tensor) -> torch.Tensor:
    numbers, *groups = rounded(weight.float().numpy())
    scales, mins = (np.repeat(each.astype(np.float32), 32, axis=1) for each in groups)
    values = numbers * scales + mins
    return torch.from_numpy(values[:, : weight.shape[1]]).to(weight.dtype)


def test_int8_models_that_compute_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its program nor its modules give what the checkpoint's own weights give."""
    save(PROGRAMS["llama"], tmp_path)

    def with_a_wrong_weight(model: Any, *arguments: Any) -> Any:
        model.model.layers[1].mlp.down_proj.weight.data *= -1
        return swap_linears(model, *arguments)

    monkeypatch.setattr(loader, "swap_linears", with_a_wrong_weight)
    with pytest.raises(
        ValueError, match=r"'LlamaForCausalLM' is not supported: with int8 weights its logits differ by \d+ %"
    ):
        runner(tmp_path, quantization="int8")
