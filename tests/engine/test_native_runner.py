"""A packed model is all that a native engine needs: it computes the same bits in a process without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.packed_decoder import Memories, PackedDecoder, PackedModel
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import ProgramUnsupportedError
from llmbackend.engine.kernels import library
from llmbackend.engine.kv_groups import KVGroups
from llmbackend.engine.messages import InferRequest, SamplingParams, StepOutput
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.packing import pack_model
from tests.engine.test_decoder_program import PROGRAMS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "logprobs": 0, "logprob_token_ids": (1, 5)},
    {"temperature": 1.0, "seed": 4, "top_k": 9, "repetition_penalty": 1.3, "bad_words": ((3, 4),)},
)
BARE_ENGINE = """
import sys
from pathlib import Path

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub"):
            raise AssertionError(f"a native engine imported {name}")

sys.meta_path.insert(0, Refusing())
import msgspec, numpy as np
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.packed_decoder import Memories, PackedDecoder, PackedModel
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, StepOutput

folder = Path(sys.argv[1])
config = msgspec.json.decode((folder / "engine.json").read_bytes(), type=EngineConfig)
decoder = msgspec.msgpack.decode((folder / "decoder").read_bytes(), type=PackedDecoder)
memories = Memories(*(np.memmap(folder / name, np.uint8, "r") for name in ("resident", "mapped")))
core = EngineCore(config, NativeRunner(config, PackedModel(decoder, memories)))
for request in msgspec.msgpack.decode((folder / "requests").read_bytes(), type=list[InferRequest]):
    core.add(request)
outputs = []
while core.has_work:
    outputs += core.step().outputs
core.close()
(folder / "outputs").write_bytes(msgspec.msgpack.encode(outputs))
"""


def config_of(path: Path, **options: Any) -> EngineConfig:
    # Without a target, steps do not depend on time.
    options = {"num_threads": 1, "num_kv_blocks": 8, "max_num_batched_tokens": 24, "step_target_ms": 0} | options
    return EngineConfig(model=str(path), transport="inline", **options)


def packed(path: Path, family: str = "qwen2", dtype: torch.dtype = torch.float32, **options: Any) -> PackedModel:
    torch.manual_seed(5)
    tf.AutoModelForCausalLM.from_config(PROGRAMS[family], dtype=dtype).save_pretrained(path)
    config = config_of(path, **options)
    return pack_model(config, load_model(config))


def requests() -> list[InferRequest]:
    return [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=tuple((7 * j + i) % 128 for j in range(17 + 9 * i)),
            sampling=SamplingParams(max_tokens=9, ignore_eos=True, **sampling),
        )
        for i, sampling in enumerate(SAMPLING)
    ]


def outputs_of(config: EngineConfig, model: PackedModel) -> list[StepOutput]:
    core = EngineCore(config, NativeRunner(config, model))
    for request in requests():
        core.add(request)
    outputs: list[StepOutput] = []
    while core.has_work:
        outputs += core.step().outputs
    core.check()
    core.close()
    assert not any(output.error for output in outputs)
    return outputs


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [("qwen2", torch.bfloat16, {"quantization": "int4"}), ("gemma2", torch.float32, {}), ("olmo2", torch.float32, {})],
)
def test_the_same_bits_without_torch(family: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    model = packed(tmp_path / "model", family, dtype, **options)
    config = config_of(tmp_path / "model", **options)
    for name, data in (
        ("engine.json", msgspec.json.encode(config)),
        ("decoder", msgspec.msgpack.encode(model.decoder)),
        ("resident", model.memories.resident.tobytes()),
        ("mapped", model.memories.mapped.tobytes()),
        ("requests", msgspec.msgpack.encode(requests())),
    ):
        (tmp_path / name).write_bytes(data)
    result = subprocess.run(
        [sys.executable, "-c", BARE_ENGINE, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    outputs = msgspec.msgpack.decode((tmp_path / "outputs").read_bytes(), type=list[StepOutput])
    assert outputs == outputs_of(config, model)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}])
@pytest.mark.parametrize("same", [("avx2", "avx_vnni"), ("avx512", "avx512_vnni", "avx512_bf16", "amx")])
def test_float32_models_have_the_same_bits_at_one_vector_width(
    same: tuple[str, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """As docs/numerics.md says."""
    variants = [name for name in library.available() if name in same]
    if len(variants) < 2:
        pytest.skip(f"this CPU can execute {len(variants)} of {', '.join(same)}")
    model, config = packed(tmp_path, "gemma2", **options), config_of(tmp_path, **options)
    decoders = [msgspec.structs.replace(model.decoder, kernel_variant=name) for name in variants]
    first, *others = (outputs_of(config, PackedModel(decoder, model.memories)) for decoder in decoders)
    assert all(outputs == first for outputs in others)


def test_blocks_behind_every_layer_s_window_are_given_back(tmp_path: Path) -> None:
    """The tokens and logprobs are those of a row that keeps all its blocks."""
    model = packed(tmp_path, "mistral")
    config = config_of(tmp_path, num_kv_blocks=12, max_model_len=128)

    def run(groups: KVGroups) -> tuple[list[StepOutput], int]:
        runner = NativeRunner(config, model)
        runner._info = msgspec.structs.replace(runner.info, kv_groups=groups)
        core = EngineCore(config, runner)
        for request in requests():
            sampling = msgspec.structs.replace(request.sampling, max_tokens=80)
            core.add(msgspec.structs.replace(request, sampling=sampling))
        outputs: list[StepOutput] = []
        most = 0
        while core.has_work:
            outputs += core.step().outputs
            most = max(most, core.info.num_blocks - core._kv_cache.num_free_blocks)
        core.check()
        core.close()
        return outputs, most

    assert NativeRunner(config, model).info.kv_groups == KVGroups(0, 1, 8)
    bounded, num_blocks = run(KVGroups(0, 1, 8))
    expected, num_all_blocks = run(KVGroups())
    assert bounded == expected
    assert num_blocks <= 6 < num_all_blocks


def test_configs_that_ask_for_modules_are_refused(tmp_path: Path) -> None:
    model = packed(tmp_path)
    for options in ({"enforce_eager": True}, {"kernels": "torch"}, {"block_size": 16}):
        with pytest.raises(ProgramUnsupportedError):
            NativeRunner(config_of(tmp_path, **options), model)


def test_adapters_are_refused_where_they_are_not_enabled(tmp_path: Path) -> None:
    config, model = config_of(tmp_path), packed(tmp_path)
    runner = NativeRunner(config, model)
    request = InferRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), lora_name="a")
    with pytest.raises(ValueError, match="'lora_name' is 'a', but this engine has no LoRA adapters"):
        runner.add_row(0, request)
    runner.close()


def test_broken_descriptions_reach_no_kernel(tmp_path: Path) -> None:
    """Each number of a description, and each length of a memory, is made wrong in turn."""
    config, model = config_of(tmp_path), packed(tmp_path, "qwen3")
    for broken in _broken(model.decoder):
        with pytest.raises((ValueError, OSError)):
            NativeRunner(config, PackedModel(broken, model.memories))
    for resident, mapped in ((-64, None), (None, -64)):
        memories = Memories(model.memories.resident[:resident], model.memories.mapped[:mapped])
        with pytest.raises(ValueError, match="the description of a packed model is broken"):
            NativeRunner(config, PackedModel(model.decoder, memories))


def _broken(decoder: PackedDecoder) -> list[PackedDecoder]:
    def change(**fields: Any) -> PackedDecoder:
        return msgspec.structs.replace(decoder, **fields)

    def changed(part: Any, **fields: Any) -> Any:
        return msgspec.structs.replace(part, **fields)

    layer = decoder.layers[0]
    attention, mlp, head = layer.attention, layer.mlp, decoder.head
    assert attention is not None and attention.cos_sin is not None and attention.q_norm is not None and mlp is not None

    def with_attention(**fields: Any) -> PackedDecoder:
        first = changed(layer, attention=changed(attention, **fields))
        return change(layers=(first, *decoder.layers[1:]))

    def with_head(**fields: Any) -> PackedDecoder:
        return change(head=changed(head, weight=changed(head.weight, **fields)))

    return [
        change(kernel_variant="nosuch"),
        change(vocab_size=decoder.vocab_size + 1),
        change(max_model_len=decoder.max_model_len + 1),
        change(layers=()),
        change(dtype="bfloat16"),
        change(embedding=changed(decoder.embedding, offset_bytes=1 << 40)),
        change(embedding=changed(decoder.embedding, offset_bytes=-64)),
        change(embedding=changed(decoder.embedding, shape=(128, 96))),
        change(norm=changed(decoder.norm, weight=changed(decoder.norm.weight, shape=(64,)))),
        change(norm=changed(decoder.norm, weight=changed(decoder.norm.weight, dtype="bfloat16"))),
        with_head(offset_bytes=head.weight.offset_bytes + 4),
        with_head(offset_bytes=1 << 62),
        with_head(n=1 << 40),
        with_head(dtype="int8"),
        with_attention(num_kv_heads=0),
        with_attention(num_kv_heads=3),
        with_attention(head_dim=0),
        with_attention(head_dim=64),
        with_attention(q_norm=changed(attention.q_norm, weight=decoder.norm.weight)),
        with_attention(cos_sin=changed(attention.cos_sin, shape=(8, 32))),
        with_attention(cos_sin=changed(attention.cos_sin, shape=(decoder.max_model_len, 31))),
        with_attention(sliding_window=-1),
        change(layers=(changed(layer, mlp=changed(mlp, down=mlp.gate)),)),
    ]
