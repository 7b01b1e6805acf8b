"""LoRA adapters in one batch: each request gets what a model merged with its adapter generates, token for token.

The adapters are files as PEFT writes them; the reference merges weights itself and runs `transformers` generate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

from llmbackend.engine.adapter_files import AdapterFiles
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kernels import library
from llmbackend.engine.messages import AdapterLoad, AdapterResult, InferRequest, SamplingParams, StepOutput
from llmbackend.engine.model.module_runner import make_model_runner
from tests.helpers.lora_adapters import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

BASE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": tf.LlamaConfig(**BASE),
    "qwen2": tf.Qwen2Config(**BASE),
    "phi3": tf.Phi3Config(**BASE),
    "cohere": tf.CohereConfig(**BASE),
    "phi": tf.PhiConfig(**BASE, partial_rotary_factor=0.5),
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES |= {
    "qwen2_moe": tf.Qwen2MoeConfig(**BASE, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": tf.Qwen3MoeConfig(**BASE, **EXPERTS, head_dim=32),
}
TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {"doll": ("q_proj", "v_proj"), "sheep.v2": ("o_proj", "gate_proj", "up_proj", "down_proj", "k_proj")},
    "qwen2": {"doll": ("q_proj", "k_proj", "v_proj", "o_proj"), "sheep.v2": ("down_proj",)},
    "phi3": {"doll": ("qkv_proj", "o_proj"), "sheep.v2": ("gate_up_proj", "down_proj")},
    "cohere": {"doll": ("q_proj", "o_proj", "down_proj"), "sheep.v2": ("gate_proj", "up_proj", "k_proj", "v_proj")},
    "phi": {"doll": ("q_proj", "dense", "fc2"), "sheep.v2": ("fc1", "k_proj", "v_proj")},
    "qwen3_moe": {"doll": ("q_proj", "k_proj"), "sheep.v2": ("v_proj", "o_proj")},
    "qwen2_moe": {"doll": ("q_proj", "o_proj"), "sheep.v2": ("gate_proj", "down_proj", "shared_expert_gate")},
}
PROMPTS = ([3, 14, 15, 92, 65, 35, 89], [27, 18, 28], [31, 41, 59, 26, 53, 58, 97, 93, 23, 84, 62], [7])
OUTPUT_TOKENS = 8


def write_model(family: str, folder: Path) -> Any:
    torch.manual_seed(1)
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # far from the uniform distribution, where rounding would decide
    model.save_pretrained(folder)
    return model


def generated(model: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False)
    return tuple(output[0, len(prompt) :].tolist())


def config_of(model: Path, adapters: dict[str, Path], **arguments: Any) -> EngineConfig:
    paths = {name: str(path) for name, path in adapters.items()}
    defaults = {"max_num_batched_tokens": 7, "num_kv_blocks": 3, "max_num_seqs": 8, "transport": "inline"}
    return EngineConfig(model=str(model), enable_lora=True, lora_modules=paths, **{**defaults, **arguments})


def run(core: EngineCore, wanted: Sequence[tuple[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    for index, (lora, prompt) in enumerate(wanted):
        core.add(InferRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, lora_name=lora))
    tokens: dict[str, tuple[int, ...]] = {}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error in (None, ""), output.error
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    core.check()
    return tokens


@pytest.mark.parametrize(("family", "kernels"), [*((family, "auto") for family in FAMILIES), ("llama", "torch")])
def test_requests_with_different_adapters_share_a_batch(family: str, kernels: str, tmp_path: Path) -> None:
    model = write_model(family, tmp_path / "model")
    references, adapters = {"": model}, {}
    for seed, (name, targets) in enumerate(TARGETS[family].items()):
        adapters[name] = tmp_path / f"adapter{seed}"
        references[name] = write_adapter(model, targets, adapters[name], seed, use_rslora=bool(seed))
    wanted = [(name, prompt) for prompt in PROMPTS for name in ("doll", "", "sheep.v2")]
    config = config_of(tmp_path / "model", adapters, kernels=kernels)
    core = EngineCore(config, make_model_runner(config))
    is_native = kernels != "torch" and library.available()
    assert core.info.path == ("native" if is_native else "modules")
    tokens = run(core, wanted)
    expected = {str(i): generated(references[name], prompt) for i, (name, prompt) in enumerate(wanted)}
    assert tokens == expected
    assert len(set(expected.values())) > len(PROMPTS), "the adapters change nothing"
    alone = {str(i): run(core, [item])["0"] for i, item in enumerate(wanted[:3])}
    assert alone == {key: expected[key] for key in alone}
    core.close()


def test_a_prefix_is_not_shared_between_adapters(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    merged = write_adapter(model, ("k_proj", "v_proj"), tmp_path / "doll", 5)
    config = config_of(tmp_path / "model", {"doll": tmp_path / "doll"}, block_size=32, max_num_batched_tokens=64)
    core = EngineCore(config, make_model_runner(config))
    prompt = [(7 * i) % 128 for i in range(40)]
    for name, reference in (("doll", merged), ("", model), ("doll", merged)):
        assert run(core, [(name, prompt)])["0"] == generated(reference, prompt)
    core.close()


def test_an_unknown_adapter_is_refused_by_name(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    write_adapter(model, ("q_proj",), tmp_path / "doll", 5)
    config = config_of(tmp_path / "model", {"doll": tmp_path / "doll"})
    core = EngineCore(config, make_model_runner(config))
    sampling = SamplingParams(max_tokens=1)
    core.add(InferRequest(request_id="a", prompt_token_ids=(1,), sampling=sampling, lora_name="cow"))
    (output,) = core.step().outputs
    assert output.error == "'lora_name' is 'cow', expected one of: doll"
    core.check()
    core.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "'use_dora' is true, only false is supported"),
        ({"bias": "all"}, '\'bias\' is "all", only "none" is supported'),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is"),
        ({"alora_invocation_tokens": [3]}, "'alora_invocation_tokens' is [3], only null is supported"),
        ({"arrow_config": {"top_k": 3}}, "'arrow_config' is"),
        ({"use_qalora": True}, "'use_qalora' is true"),
        ({"lora_bias": True}, "'lora_bias' is true"),
        ({"target_parameters": ["experts.down_proj"]}, "'target_parameters' is"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "'layer_replication' is"),
        ({"r": 32}, "'r' is 32, expected an integer from 1 to 16 (engine argument 'max_lora_rank')"),
    ],
)
def test_an_adapter_that_asks_for_more_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    write_adapter(model, ("q_proj",), tmp_path / "doll", 5, **change)
    with pytest.raises(ValueError, match="LoRA 'doll'") as refused:
        make_model_runner(config_of(tmp_path / "model", {"doll": tmp_path / "doll"}))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lora_alpha": float("nan")}, "'lora_alpha' is NaN, expected a number of at most 10000 times the rank"),
        ({"lora_alpha": float("-inf")}, "'lora_alpha' is -Infinity"),
        ({"lora_alpha": 1e308}, "'lora_alpha' is 1e+308"),
        ({"lora_alpha": 10**400}, "'lora_alpha' is 1000"),
        ({"lora_alpha": "16"}, "'lora_alpha' is \"16\""),
        ({"alpha_pattern": {"q_proj": -1e30}}, "'alpha_pattern' is -1e+30"),
        *(({"r": rank}, "expected an integer from 1 to 16") for rank in (10**9, -4, 0, 8.5, "8", True)),
    ],
)
def test_a_field_out_of_range_is_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    """What adapter_config.json says, whatever the matrices are."""
    model = write_model("llama", tmp_path / "model")
    write_adapter(model, ("q_proj",), tmp_path / "doll", 5)
    path = tmp_path / "doll" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="LoRA 'doll'") as refused:
        make_model_runner(config_of(tmp_path / "model", {"doll": tmp_path / "doll"}))
    assert told in str(refused.value) and f"'{next(iter(change))}' is" in str(refused.value)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ([], "adapter_config.json is not a JSON object"),
        ({"r": 2}, "'lora_alpha' is null, expected a number of at most 10000 times the rank"),
        ({"r": 2, "lora_alpha": 2, "alpha_pattern": {"(": 1}}, "missing ), unterminated subpattern"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(written: object, told: str, tmp_path: Path) -> None:
    matrices = {"A": torch.ones(2, 4), "B": torch.ones(4, 2)}
    tensors = {f"base_model.model.layer.lora_{side}.weight": matrix for side, matrix in matrices.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="LoRA 'doll'") as refused:
        AdapterFiles({"layer": (4, 4)}, max_lora_rank=16).read("doll", str(tmp_path))
    assert told in str(refused.value)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**{**BASE, "hidden_size": 32}), dtype=torch.float32)
    write_model("llama", tmp_path / "model")
    write_adapter(other, ("q_proj",), tmp_path / "doll", 5)
    with pytest.raises(ValueError, match=r"was made for a 'model\.layers\.0\.self_attn\.q_proj' of \[32, 32\]"):
        make_model_runner(config_of(tmp_path / "model", {"doll": tmp_path / "doll"}))


def test_alpha_patterns_are_peft_s(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    merged = write_adapter(model, ("q_proj", "v_proj"), tmp_path / "doll", 5, alpha_pattern={"v_proj": 32})
    config = config_of(tmp_path / "model", {"doll": tmp_path / "doll"})
    core = EngineCore(config, make_model_runner(config))
    assert run(core, [("doll", PROMPTS[0])])["0"] == generated(merged, PROMPTS[0])
    core.close()


def test_adapters_that_come_and_go_while_others_run(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    references = {"": model}
    for seed, name in enumerate(("doll", "sheep")):
        references[name] = write_adapter(model, TARGETS["llama"]["sheep.v2"], tmp_path / name, seed)
    config = config_of(tmp_path / "model", {"doll": tmp_path / "doll"}, num_kv_blocks=8)
    core = EngineCore(config, make_model_runner(config))
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    tokens: dict[str, tuple[int, ...]] = {}
    results: list[AdapterResult] = []

    def add(name: str) -> None:
        core.add(InferRequest(request_id=name, prompt_token_ids=(3, 14, 15), sampling=sampling, lora_name=name))

    def step() -> None:
        result = core.step()
        results.extend(result.adapters)
        for output in result.outputs:
            assert output.error in (None, ""), output.error
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids

    add("doll")
    step()
    core.adapters.load(AdapterLoad("sheep", str(tmp_path / "sheep")))
    core.adapters.load(AdapterLoad("broken", str(tmp_path / "nowhere")))
    core.adapters.drop("doll")  # it has a request
    add("sheep")  # at once: it waits for the files
    while core.has_work:
        step()
    assert tokens == {name: generated(references[name], (3, 14, 15)) for name in ("doll", "sheep")}
    assert [(one.name, one.error[:32]) for one in sorted(results, key=lambda one: one.name)] == [
        ("broken", "LoRA 'broken' cannot be read fro"),
        ("sheep", ""),
    ]
    add("doll")
    (output,) = core.step().outputs
    assert output.error == "'lora_name' is 'doll', expected one of: sheep"
    assert run(core, [("sheep", (3, 14, 15))])["0"] == tokens["sheep"]
    core.close()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_more_adapters_than_stay_in_memory(kernels: str, tmp_path: Path) -> None:
    """Those that were named longest ago make room, once no request uses them, and are read again."""
    model = write_model("llama", tmp_path / "model")
    names = [f"pet{i}" for i in range(5)]
    references = {
        name: write_adapter(model, ("q_proj", "down_proj"), tmp_path / name, i) for i, name in enumerate(names)
    }
    paths = {name: tmp_path / name for name in names[:4]}
    config = config_of(tmp_path / "model", paths, num_kv_blocks=16, max_cpu_loras=2, kernels=kernels)
    runner = make_model_runner(config)
    core = EngineCore(config, runner)
    held: list[int] = []

    def count_adapters() -> int:
        adapters: Any = runner.adapters  # type: ignore[attr-defined]
        return len(adapters._numbers if kernels == "auto" else adapters.batch._index_of)

    expected = {name: generated(references[name], PROMPTS[0]) for name in names}
    order = [0, 3, 1, 2, 0, 0, 3, 2, 1]
    tokens = run(core, [(names[i], PROMPTS[0]) for i in order])
    assert tokens == {str(place): expected[names[i]] for place, i in enumerate(order)}
    assert count_adapters() <= 2
    core.adapters.load(AdapterLoad("pet4", str(tmp_path / "pet4")))
    results: list[AdapterResult] = []
    while core.has_work:
        results += core.step().adapters
        held.append(count_adapters())
    assert results == [AdapterResult("pet4")] and max(held) <= 2
    assert run(core, [("pet4", PROMPTS[0]), ("pet0", PROMPTS[0])]) == {"0": expected["pet4"], "1": expected["pet0"]}
    core.adapters.drop("pet4")
    assert run(core, [("pet1", PROMPTS[0]), ("pet2", PROMPTS[0])]) == {"0": expected["pet1"], "1": expected["pet2"]}
    core.close()


@pytest.mark.nightly
def test_a_thousand_known_adapters(tmp_path: Path) -> None:
    """32 in memory: each request gets its own adapter's tokens, also of those that must be read again."""
    model = write_model("llama", tmp_path / "model")
    references = [write_adapter(model, ("q_proj", "down_proj"), tmp_path / str(i), i) for i in range(8)]
    expected = [generated(reference, PROMPTS[0]) for reference in references]
    paths = {f"pet{i}": tmp_path / str(i % 8) for i in range(1000)}
    config = config_of(tmp_path / "model", paths, num_kv_blocks=16, max_cpu_loras=32)
    core = EngineCore(config, make_model_runner(config))
    wanted = [(f"pet{37 * i % 1000}", PROMPTS[0]) for i in range(200)]
    tokens = run(core, wanted)
    assert tokens == {str(i): expected[int(name.removeprefix("pet")) % 8] for i, (name, _) in enumerate(wanted)}
    core.close()


def test_adapters_are_read_in_the_order_of_their_requests(tmp_path: Path) -> None:
    """The first of many that want room does not wait for the later ones."""
    model = write_model("llama", tmp_path / "model")
    paths = {f"pet{i}": tmp_path / str(i) for i in range(6)}
    for seed, path in enumerate(paths.values()):
        write_adapter(model, ("q_proj",), path, seed)
    config = config_of(tmp_path / "model", paths, num_kv_blocks=16, max_cpu_loras=1)
    core = EngineCore(config, make_model_runner(config))
    tokens = run(core, [(name, PROMPTS[0]) for name in paths])
    assert list(tokens) == [str(i) for i in range(6)], "the order of their first tokens"
    core.close()


def test_an_adapter_that_cannot_be_read_again_ends_its_requests(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    paths = {name: tmp_path / name for name in ("doll", "sheep")}
    for seed, path in enumerate(paths.values()):
        write_adapter(model, ("q_proj",), path, seed)
    config = config_of(tmp_path / "model", paths, max_cpu_loras=1)
    core = EngineCore(config, make_model_runner(config))
    sheep_config = (tmp_path / "sheep" / "adapter_config.json").read_text()
    (tmp_path / "sheep" / "adapter_config.json").unlink()
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    for name in ("doll", "sheep", "", "cow"):
        core.add(InferRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling, lora_name=name))
    ends: dict[str, StepOutput] = {}
    while core.has_work:
        ends |= {output.request_id: output for output in core.step().outputs if output.finish_reason}
    errors = {name: output.error for name, output in ends.items()}
    assert errors["doll"] == errors[""] == ""
    assert errors["sheep"].startswith("LoRA 'sheep' cannot be read from")
    assert errors["cow"].startswith("'lora_name' is 'cow', expected one of: ")
    assert [ends[name].is_bad_input for name in ("sheep", "cow")] == [False, True]

    (tmp_path / "sheep" / "adapter_config.json").write_text(sheep_config)
    core.add(InferRequest(request_id="again", prompt_token_ids=(1,), sampling=sampling, lora_name="sheep"))
    num_tokens = 0
    while core.has_work:
        num_tokens += sum(len(output.token_ids) for output in core.step().outputs)
    assert num_tokens == 2
    core.check()
    core.close()
