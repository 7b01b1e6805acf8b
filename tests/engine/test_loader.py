"""What the loader takes, what it refuses and how it says so; and that packed linear layers are linear layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import nn

from llmbackend.engine.config import AUTO_CONTEXT, EngineConfig
from llmbackend.engine.cpu.linear import PackedLinear, has_native, pack_linears
from llmbackend.engine.cpu.native_memory import num_kv_blocks
from llmbackend.engine.model.compatibility import check_model
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.module_runner import make_model_runner

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama_dir(path: Path, **changes: Any) -> Path:
    """A checkpoint directory with a config and no weights."""
    tf.LlamaConfig(**{**TINY, **changes}, architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


def dummy(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), load_format="dummy", transport="inline", **options)


UNSUPPORTED = {
    "DeepseekV32ForCausalLM": tf.DeepseekV32Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        index_topk=32,
    ),
    "MambaForCausalLM": tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "JambaForCausalLM": tf.JambaConfig(**TINY),
    "T5ForConditionalGeneration": tf.T5Config(vocab_size=64, d_model=32, num_layers=2),
    "BertModel": tf.ViTConfig(),
}


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_a_model_that_would_compute_nonsense_is_refused_before_its_weights_are_read(
    architecture: str, tmp_path: Path
) -> None:
    config = UNSUPPORTED[architecture]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1 << 16)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"model architecture '{architecture}' is not supported: "):
        load_model(EngineConfig(model=str(tmp_path), transport="inline", max_model_len=64))


class _Bidirectional(tf.LlamaForCausalLM):  # type: ignore[misc]
    """A model that passes for Llama and adds something of its own to the order of tokens."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, position_ids=position_ids, **kwargs)
        output.logits = output.logits + output.logits.cumsum(1)
        return output


def test_a_model_that_mixes_sequences_is_caught_by_its_logits() -> None:
    from llmbackend.engine.attention import interface

    interface.register()
    torch.manual_seed(0)
    config = tf.LlamaConfig(**TINY)
    config._attn_implementation = interface.PAGED_ATTENTION
    with pytest.raises(ValueError, match="'_Bidirectional' is not supported: logits of a flattened batch differ"):
        check_model(_Bidirectional(config).eval())


def test_limits_of_length(tmp_path: Path) -> None:
    llama_dir(tmp_path)
    assert load_model(dummy(tmp_path)).max_model_len == 128
    assert load_model(dummy(tmp_path, max_model_len=100)).max_model_len == 100
    with pytest.raises(ValueError, match="'max_model_len' is 129, expected at most 128, the model's limit"):
        load_model(dummy(tmp_path, max_model_len=129))


def test_devices(tmp_path: Path) -> None:
    llama_dir(tmp_path)
    for device in ("toaster", "meta"):
        with pytest.raises(ValueError, match=f"'device' is '{device}', expected 'cpu', 'cuda' or 'cuda:N'"):
            load_model(dummy(tmp_path, device=device))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"'device' is 'cuda', but this torch .* sees no CUDA device"):
            load_model(dummy(tmp_path, device="cuda"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors file"):
        load_model(EngineConfig(model=str(llama_dir(tmp_path)), transport="inline"))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="weights cannot be read"):
        load_model(EngineConfig(model=str(tmp_path), transport="inline"))
    with pytest.raises(OSError, match="nowhere"):
        load_model(EngineConfig(model=str(tmp_path / "nowhere"), transport="inline"))


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**TINY, eos_token_id=5)
    torch.manual_seed(0)
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert make_model_runner(EngineConfig(model=str(tmp_path), transport="inline")).info.eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert make_model_runner(EngineConfig(model=str(tmp_path), transport="inline")).info.eos_token_ids == (9, 11)


def test_random_weights_depend_on_the_seed(tmp_path: Path) -> None:
    llama_dir(tmp_path)
    first, same, other = (load_model(dummy(tmp_path, seed=seed)).model for seed in (1, 1, 2))
    weights = [model.get_input_embeddings().weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_kv_memory_is_sized_in_bytes_or_blocks(tmp_path: Path) -> None:
    llama_dir(tmp_path)
    block_bytes = 16 * 2 * 2 * (8 + 8) * 4  # tokens, layers, kv heads, key and value dims, float32
    config = dummy(tmp_path, block_size=16, kv_cache_memory_bytes=5 * block_bytes + 7, dtype="float32")
    info = make_model_runner(config).info
    assert (info.num_blocks, info.block_size, info.dtype, info.device) == (5, 16, "float32", "cpu")
    assert "threads" in info.description
    assert make_model_runner(dummy(tmp_path, num_kv_blocks=3)).info.num_blocks == 3
    with pytest.raises(ValueError, match="'kv_cache_memory_bytes' is 100, expected at least"):
        make_model_runner(dummy(tmp_path, kv_cache_memory_bytes=100))


def test_a_request_of_the_given_context_fits_the_kv_memory() -> None:
    def blocks(**arguments: Any) -> int:
        return num_kv_blocks(EngineConfig(model="m", block_size=32, **arguments), 1 << 20, 4096)

    assert blocks() == blocks(max_model_len=AUTO_CONTEXT) == 32  # 1 GiB
    assert blocks(max_model_len=4096) == 128
    with pytest.raises(ValueError, match="is 1073741824, expected at least 4294967296: one request of 4096 tokens"):
        blocks(max_model_len=4096, kv_cache_memory_bytes=1 << 30)


def test_given_kv_memory_that_no_request_can_use_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def blocks(**arguments: Any) -> int:
        return num_kv_blocks(EngineConfig(model="m", block_size=32, max_num_seqs=2, **arguments), 1024, 64)

    assert blocks() == blocks(kv_cache_memory_bytes=4 * 32 * 1024) == 4
    assert not caplog.text
    assert blocks(kv_cache_memory_bytes=1 << 20) == 4
    assert "'kv_cache_memory_bytes' is 1048576, of which 131072 are used: 2 requests (max_num_seqs)" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_is_a_linear_layer_and_treats_rows_alike(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias, dtype=dtype)
    packed = PackedLinear(plain.weight, plain.bias, dtype if has_native(dtype) else torch.float32)
    with torch.inference_mode():
        x = torch.randn(2, 33, 96, dtype=dtype)
        everything = packed(x)
        torch.testing.assert_close(everything, plain(x), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
        for rows in (0, 1, 2, 5, 32):
            assert torch.equal(packed(x[:1, :rows]), everything[:1, :rows])


def test_packing_swaps_plain_linear_layers_alone(tmp_path: Path) -> None:
    class Special(nn.Linear):
        """A subclass may compute something else."""

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Special(4, 4))
    assert pack_linears(model, torch.float32) == "packed float32"
    assert [type(layer) for layer in model] == [PackedLinear, nn.ReLU, Special]
