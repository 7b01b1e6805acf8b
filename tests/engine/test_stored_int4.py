"""Weights that a checkpoint has in 4 bits (compressed-tensors, GPTQ, AWQ) are multiplied as they are on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.packed_decoder import PackedDecoder, PackedModel
from llmbackend.engine.cpu.packed_parts import MatrixAt, PackedProjection
from llmbackend.engine.gpu.weights.stored import mapped_tensors
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.model.compatibility import CheckedModel
from llmbackend.engine.model.int4_formats import Int4Format, packed_format
from llmbackend.engine.model.kept_matrices import StoredInt4
from llmbackend.engine.model.loader import LoadedModel, load_model
from llmbackend.engine.model.packing import pack_model
from llmbackend.engine.model.unloaded_model import unloaded_model
from tests.engine.test_decoder_program import greedy
from tests.helpers.gpu.int4_checkpoints import save_int4, write_config
from tests.helpers.gpu.tiny_models import SIZES
from tests.helpers.small_configs import VOCAB, small_config

LLAMA = tf.LlamaConfig(**SIZES | {"hidden_size": 128})
"""Heads of 32 have a native program."""
FORMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "AWQ": ("awq", 32, {}),
    "AWQ, groups that are cut": ("awq", 64, {}),
    "GPTQ": ("gptq", 64, {}),
    "GPTQ, whole rows": ("gptq", -1, {"symmetric": True}),
    "GPTQ, second version": ("gptq", 32, {"version": 2}),
    "GPTQ, desc_act": ("gptq", 32, {"desc_act": True}),
    "GPTQ, desc_act, symmetric": ("gptq", 64, {"desc_act": True, "symmetric": True}),
    "compressed-tensors": ("compressed-tensors", 32, {}),
    "compressed-tensors, symmetric": ("compressed-tensors", 64, {"symmetric": True}),
    "compressed-tensors, channels": ("compressed-tensors", -1, {}),
}
PROMPT = tuple((11 * i + 5) % SIZES["vocab_size"] for i in range(40))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]


def saved(path: Path, form: str, config: Any = LLAMA) -> Path:
    """The checkpoint; beside it "plain", with the weights that it stands for."""
    method, group_size, options = FORMS[form]
    save_int4(config, path, method, group_size, **options)
    return path / "int4"


def stored_of(path: Path) -> StoredInt4:
    form = packed_format(json.loads((path / "config.json").read_text())["quantization_config"])
    assert isinstance(form, Int4Format)
    return StoredInt4(form, mapped_tensors([path / "model.safetensors"]))


def loaded_of(path: Path, **arguments: Any) -> LoadedModel:
    return load_model(with_directories(EngineConfig(model=str(path), transport="inline", **arguments)))


def linear(loaded: LoadedModel, name: str) -> Any:
    return loaded.model.model.layers[1].get_submodule(name)


def change(path: Path, changes: dict[str, torch.Tensor]) -> None:
    """In the checkpoint's file."""
    file = path / "model.safetensors"
    save_file(load_file(file) | changes, file, {"format": "pt"})


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_those_of_the_file(form: str, tmp_path: Path) -> None:
    path = saved(tmp_path, form)
    plain, stored = load_file(tmp_path / "plain" / "model.safetensors"), stored_of(path)
    names = [name.removesuffix(".weight") for name in plain if "_proj" in name]
    assert len(names) == 21
    for name in names:
        assert stored.type_of(name) is (Type.INT4 if "symmetric" in FORMS[form][2] else Type.INT4_ZERO)
        matrix, expected = stored.read(name), plain[f"{name}.weight"].numpy()
        assert (matrix.order is not None) == FORMS[form][2].get("desc_act", False)
        assert stored.order_of(name) == (b"" if matrix.order is None else matrix.order.tobytes())
        assert np.array_equal(matrix.values(), expected)
    assert stored.type_of("model.norm") is None and stored.order_of("nothing") == b""


@pytest.mark.parametrize("form", FORMS)
def test_programs_compute_what_those_of_plain_weights_do(form: str, tmp_path: Path) -> None:
    path = saved(tmp_path, form)
    loaded = loaded_of(path)
    kinds = {linear(loaded, f"self_attn.{name}_proj").packed.type for name in "qkvo"}
    assert kinds == {Type.INT4 if "symmetric" in FORMS[form][2] else Type.INT4_ZERO}
    assert loaded.model.lm_head.packed.type is Type.INT8
    config = with_directories(EngineConfig(model=str(path), transport="inline"))
    assert "int4 linear layers, one native program" in make_runner(config).info.description
    kept = greedy(path, PROMPT, 1, dtype="float32", quantization="int4")[1][0]
    exact = greedy(tmp_path / "plain", PROMPT, 1, dtype="float32")[1][0]
    assert kept == pytest.approx(exact, abs=0.25)


@pytest.mark.parametrize(("form", "how"), [("AWQ", "native"), ("GPTQ", "native"), ("GPTQ, desc_act", "modules")])
def test_latent_attention_multiplies_by_what_the_numbers_stand_for(form: str, how: str, tmp_path: Path) -> None:
    """Queries, by the matrix of keys turned over, which is rounded to 8 bits; not by one with an order of inputs."""
    path = saved(tmp_path, form, small_config("minicpm3", {"q_lora_rank": 64, "kv_lora_rank": 64}, 64))
    settings = EngineConfig(model=str(path), transport="inline", dtype="float32", quantization="int4")
    assert make_runner(settings).info.path == how
    prompt = tuple(token % VOCAB for token in PROMPT)
    program, modules = (
        greedy(path, prompt, 1, dtype="float32", quantization="int4", enforce_eager=eager)[1][0]
        for eager in (False, True)
    )
    assert program == pytest.approx(modules, abs=0.25)


def test_embeddings_have_the_factor_of_the_model(tmp_path: Path) -> None:
    """Of MiniCPM 3 12, not the root of the width."""
    path = saved(tmp_path, "AWQ", small_config("minicpm3", {"q_lora_rank": 64, "kv_lora_rank": 64}, 64))
    prompt = tuple(token % VOCAB for token in PROMPT)
    found, expected = (greedy(each, prompt, 4, dtype="float32") for each in (path, tmp_path / "plain"))
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=1e-3)


def test_with_a_dtype_its_weights_become_plain(tmp_path: Path) -> None:
    """In groups all over the matrix too, which are refused on a GPU alone."""
    path = saved(tmp_path, "GPTQ, desc_act")
    found, expected = (greedy(each, PROMPT, 4, dtype="float32") for each in (path, tmp_path / "plain"))
    assert found == expected


def test_modules_compute_what_the_program_does(tmp_path: Path) -> None:
    path = saved(tmp_path, "GPTQ, desc_act")
    program, modules = (
        greedy(path, PROMPT, 1, dtype="float32", quantization="int4", enforce_eager=eager)[1][0]
        for eager in (False, True)
    )
    assert modules == pytest.approx(program, abs=0.05)


def test_neighbours_have_one_type_and_one_order(tmp_path: Path) -> None:
    path = saved(tmp_path, "GPTQ, desc_act, symmetric")
    layer, tensors = "model.layers.1", load_file(path / "model.safetensors")
    zeros = tensors[f"{layer}.self_attn.k_proj.qzeros"]
    other_order = tensors[f"{layer}.mlp.up_proj.g_idx"].roll(1)
    change(path, {f"{layer}.self_attn.k_proj.qzeros": zeros + 1, f"{layer}.mlp.up_proj.g_idx": other_order})
    loaded = loaded_of(path)
    assert {linear(loaded, f"self_attn.{name}_proj").packed.type for name in "qkv"} == {Type.INT4_ZERO}
    assert {linear(loaded, f"mlp.{name}_proj").packed.type for name in ("gate", "up")} == {Type.INT8}
    assert linear(loaded, "mlp.down_proj").packed.type is Type.INT4


def test_scales_that_float16_does_not_hold_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path, "compressed-tensors")
    name = "model.layers.1.self_attn.o_proj"
    scale = load_file(path / "model.safetensors")[f"{name}.weight_scale"]
    exact = {f"model.layers.{i}.mlp.down_proj.weight_scale": torch.full((128, 3), 0.5).bfloat16() for i in range(3)}
    change(path, {f"{name}.weight_scale": scale.float() * 1.0001, **exact})
    loaded = loaded_of(path)
    assert linear(loaded, "self_attn.o_proj").packed.type is Type.INT8
    assert linear(loaded, "mlp.down_proj").packed.type is Type.INT4_ZERO
    assert f"float16 does not hold the scales of {name}: they become int8" in caplog.text


@pytest.mark.parametrize("arguments", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kernels": "torch"}])
def test_what_is_asked_for_comes_first(arguments: dict[str, Any], tmp_path: Path) -> None:
    config = EngineConfig(model=str(saved(tmp_path, "AWQ")), **arguments)
    assert with_directories(config) is config


def test_a_gpu_gets_its_own_layout(tmp_path: Path) -> None:
    left_open = EngineConfig(model=str(saved(tmp_path, "AWQ")), device="auto")
    assert with_directories(left_open, has_gpu=lambda: False).quantization == "int4"
    assert with_directories(left_open, has_gpu=lambda: True).quantization is None
    assert with_directories(EngineConfig(model=left_open.model, device="cuda")).quantization is None


def test_plain_weights_under_a_label_stay_as_they_are(tmp_path: Path) -> None:
    saved(tmp_path, "AWQ")
    stated = json.loads((tmp_path / "int4" / "config.json").read_text())["quantization_config"]
    write_config(tmp_path, stated)
    plain = (tmp_path / "plain" / "model.safetensors").read_bytes()
    (tmp_path / "int4" / "model.safetensors").write_bytes(plain)
    config = EngineConfig(model=str(tmp_path / "int4"), transport="inline")
    assert with_directories(config).quantization is None
    loaded = load_model(msgspec.structs.replace(config, quantization="int4"))
    assert linear(loaded, "mlp.down_proj").packed.type is Type.INT4_MIN


def test_a_gptq_that_states_gemm_has_the_layout_of_awq(tmp_path: Path) -> None:
    """As GPTQModel 7.6 writes it of numbers that are rounded to nearest."""
    path = saved(tmp_path, "AWQ")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    write_config(tmp_path, settings | {"quant_method": "gptq", "checkpoint_format": "gemm", "format": "gemm"})
    kept, exact = (greedy(each, PROMPT, 4, dtype="float32") for each in (path, tmp_path / "plain"))
    assert kept == exact


def test_float16_becomes_bfloat16(tmp_path: Path) -> None:
    """The native kernels have no float16, which most such checkpoints state."""
    path = saved(tmp_path, "AWQ")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert loaded_of(path).dtype == torch.bfloat16
    assert unloaded_model(with_directories(EngineConfig(model=str(path)))).dtype == "bfloat16"


def test_an_order_that_is_none_is_refused_before_a_kernel_sees_it(tmp_path: Path) -> None:
    config = with_directories(EngineConfig(model=str(saved(tmp_path, "GPTQ, desc_act")), transport="inline"))
    packed = pack_model(config, load_model(config))
    packed.decoder.check(packed.memories)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed.decoder), type=PackedDecoder) == packed.decoder
    attention = packed.decoder.layers[0].attention
    assert attention is not None
    qkv = attention.qkv[0].weight
    assert qkv.order_offset_bytes is not None
    order = packed.memories.resident[qkv.order_offset_bytes :][: 4 * qkv.k].view(np.int32)
    order[5] = qkv.k
    with pytest.raises(ValueError, match="its order of inputs does not fit the rest"):
        packed.decoder.check(packed.memories)
    order[5] = 0
    _check_with(packed, msgspec.structs.replace(qkv, order_offset_bytes=len(packed.memories.resident)))


def _check_with(packed: PackedModel, qkv: MatrixAt) -> None:
    first, *others = packed.decoder.layers
    assert first.attention is not None
    projection = PackedProjection(qkv, first.attention.qkv[0].bias)
    first = msgspec.structs.replace(first, attention=msgspec.structs.replace(first.attention, qkv=(projection,)))
    with pytest.raises(ValueError, match="the description of a packed model is broken"):
        msgspec.structs.replace(packed.decoder, layers=(first, *others)).check(packed.memories)


@pytest.mark.parametrize(("is_wrong", "expected"), [(False, ""), (True, "by ")])
def test_one_logit_that_rounding_moved_far_is_no_other_model(is_wrong: bool, expected: str) -> None:
    """Models rounded to 4 bits may be so: in bfloat16 the logits of a batch and of each row alone differ."""
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    other = logits.clone()
    other[: 8 if is_wrong else 1, : 100 if is_wrong else 1] += 0.1 * logits.abs().max()
    checked = CheckedModel({}, {}, (), logits)
    assert checked.difference(other).startswith(expected) and bool(checked.difference(other)) == is_wrong
