"""A small random model of each family, and what the engine makes of it: served natively, as modules, or refused.

For docs/models.md (`python -m tools.families`) and its tests. Invariant: what is served gives the tokens of
transformers; every causal language model of transformers has a result in families.json, which a run of all writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers as tf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.load_forecast import forecast
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.module_runner import make_model_runner

from .small_configs import small_config

_MIXED: Final = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_SCALED_QUERIES: Final = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
FACTORS: Final = {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
_UNKNOWN: Final = "its layers cannot be determined without weights"
_MOST_PARAMETERS: Final = 30_000_000
HEAD_DIMS: Final = (64, 128)
ALL: Final = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
RESULTS_FILE: Final = Path(__file__).with_name("families.json")


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    models: str = ""
    """Known ones, for the docs."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of its config, beyond the sizes."""
    note: str = ""
    """For the docs, instead of the server's reason."""


class Result(NamedTuple):
    how: str
    """"native", "modules", "refused", or "not built": transformers has made no model from a config."""
    why: str = ""
    """Not natively, not at all: what the server says, or transformers."""


FAMILIES: Final = (
    Family("llama", "Llama 2 and 3, SmolLM2, TinyLlama, Yi, many others"),
    Family("mistral", "Mistral 7B, Nemo"),
    Family("ministral", "Ministral 8B", _MIXED),
    Family("ministral3", "Ministral 3, as text", {"rope_parameters": _SCALED_QUERIES}),
    Family("qwen2", "Qwen2, Qwen2.5, QwQ"),
    Family("qwen3", "Qwen3"),
    Family("gemma", "Gemma"),
    Family("gemma2", "Gemma 2", {"attn_logit_softcapping": 2.0}),
    Family("gemma3_text", "Gemma 3, as text", _MIXED),
    Family("vaultgemma", "VaultGemma", _MIXED),
    Family("phi", "Phi 1, 1.5, 2", {"partial_rotary_factor": 0.5}, "Phi 2, with heads of 80, as modules"),
    Family("phi3", "Phi 3, 3.5, 4", {"sliding_window": None}),
    Family("olmo", "OLMo"),
    Family("olmo2", "OLMo 2"),
    Family("olmo3", "OLMo 3", _MIXED),
    Family("granite", "Granite 3, dense", FACTORS),
    Family("smollm3", "SmolLM3", {"no_rope_layers": [1, 0]}),
    Family("ernie4_5", "ERNIE 4.5, dense"),
    Family("glm", "GLM-4 9B"),
    Family("glm4", "GLM-4 0414, GLM-Z1"),
    Family("cohere", "Command R", {"logit_scale": 0.5}, "Command R+, with norms of its own over heads, as modules"),
    Family("cohere2", "Command R7B, Command A", _MIXED | {"logit_scale": 0.5}),
    Family("stablelm", "StableLM", {"partial_rotary_factor": 0.25}),
    Family("starcoder2", "StarCoder2"),
    Family("nemotron", "Nemotron 3, 4, Minitron"),
    Family("exaone4", "EXAONE 4", _MIXED),
    Family("seed_oss", "Seed-OSS"),
    Family("hunyuan_v1_dense", "Hunyuan, dense"),
    Family("helium", "Helium"),
    Family("arcee", "AFM 4.5B"),
    Family("internlm3", "InternLM3"),
    Family("iquestcoder", "IQuest-Coder"),
    Family("jais2", "Jais 2"),
    Family("hyperclovax", "HyperCLOVA X SEED", FACTORS),
    Family("cwm", "Code World Model", _MIXED),
    Family("apertus", "Apertus", note="xIELU, which has numbers of its own"),
    Family("bitnet", "BitNet b1.58", note="norms within attention and MLP"),
    Family("granite_swa", "Granite with windows", _MIXED, "rotary tables by layer"),
    Family("nanochat", "nanochat", note="heads turned the other way"),
    Family("gpt2", "GPT-2", note="learned positions"),
    Family("gpt_bigcode", "StarCoder", note="learned positions"),
    Family("gpt_neox", "Pythia, GPT-NeoX", note="query, key and value of a head side by side in one matrix"),
    Family("persimmon", "Persimmon", note="query, key and value of a head side by side in one matrix"),
    Family("opt", "OPT", note="learned positions"),
    Family("bloom", "BLOOM, BLOOMZ", note="ALiBi"),
    Family("mpt", "MPT", note="ALiBi"),
    Family("falcon", "Falcon 7B, 40B", note="query, key and value of a head side by side in one matrix"),
    Family("biogpt", "BioGPT", note="learned positions"),
    Family("qwen3_moe", "Qwen3 30B-A3B, 235B-A22B"),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2 57B-A14B"),
    Family("gpt_oss", "gpt-oss", _MIXED),
    Family("mixtral", "Mixtral"),
    Family("olmoe", "OLMoE"),
    Family("granitemoe", "Granite 3, with experts"),
    Family("glm4_moe", "GLM-4.5, 4.6"),
    Family("ernie4_5_moe", "ERNIE 4.5, with experts"),
    Family("phimoe", "Phi 3.5 MoE", {"sliding_window": None}, "experts selected in an unknown way"),
    Family("hunyuan_v1_moe", "Hunyuan A13B"),
    Family("flex_olmo", "FlexOlmo"),
    Family("afmoe", "Arcee Trinity"),
    Family("laguna", "Laguna"),
    Family("deepseek_v2", "DeepSeek V2, V2 Lite, Coder V2"),
    Family("deepseek_v3", "DeepSeek V3, V3.1, R1"),
    Family("deepseek_v32", "DeepSeek V3.2, up to 2,048 tokens"),
    Family("glm_moe_dsa", "GLM-5, up to 2,048 tokens", {"index_topk_freq": 2}),
    Family("glm4_moe_lite", "GLM-4.7 Flash"),
    Family("youtu", "Youtu-LLM"),
    Family("minicpm3", "MiniCPM 3"),
    Family("axk1", "A.X K1"),
)
"""Those that are tried daily."""
_KNOWN: Final = {family.model_type: family for family in FAMILIES}
OTHERS: Final = tuple(Family(name) for name in ALL if name not in _KNOWN)


def family_of(model_type: str) -> Family:
    return _KNOWN.get(model_type, Family(model_type))


def results() -> Mapping[str, Result]:
    """By type of model, as the last run has found them."""
    return {name: Result(*each) for name, each in json.loads(RESULTS_FILE.read_text()).items()}


NATIVE: Final = tuple(family for family in FAMILIES if results().get(family.model_type, Result("")).how == "native")

PROMPTS: Final = tuple(
    tuple((step * i + 3) % 128 for i in range(length)) for step, length in ((7, 23), (11, 5), (3, 14))
)
MAX_MODEL_LEN: Final = 96
"""Some configs state none."""
OUTPUT_TOKENS: Final = 8
Generated = list[tuple[list[int], list[float]]]


def save_model(family: Family, head_dim: int, path: Path) -> Any:
    """A random model whose every part shows in its logits, written to `path` and read from there by transformers."""
    config = small_config(family.model_type, family.changes, head_dim)
    with torch.device("meta"):
        size = sum(each.numel() for each in tf.AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"a small config of {family.model_type} gives {size:,} parameters")
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        corrections = ((name, each) for name, each in model.named_buffers() if name.endswith("correction_bias"))
        for name, tensor in (*model.named_parameters(), *corrections):
            _spread(name, tensor)
    model.save_pretrained(path)
    return type(model).from_pretrained(path, dtype=torch.float32).eval()


def _spread(name: str, tensor: torch.Tensor) -> None:
    draw = torch.randn_like(tensor)
    if tensor.dim() > 1:
        tensor.copy_(draw * (1.0 if "emb" in name else 2.0 * tensor.shape[-1] ** -0.5))
    else:
        tensor.add_(0.2 * draw)


def tried(family: Family, path: Path) -> Result:
    """What the engine makes of a model of this family. AssertionError: it is served otherwise than by transformers, or
    `llmbackend check` says something else of it."""
    try:
        model = save_model(family, HEAD_DIMS[0], path)
    except Exception as error:  # of transformers, or of packages that it lacks
        return Result("not built", f"{type(error).__name__}: {error}")
    try:
        core = engine(path, dtype="float32")
    except ValueError as refusal:
        return Result("refused", str(refusal))
    info = core.info
    foreseen = forecast(EngineConfig(model=str(path), max_model_len=MAX_MODEL_LEN)).why_not_faster
    assert foreseen in (info.path_reason, _UNKNOWN), f"check says '{foreseen}', the engine '{info.path_reason}'"
    found = generated(core)
    assert len({tuple(tokens) for tokens, _ in found}) == len(found), "the random model's output is degenerate"
    assert_transformers(model, found)
    return Result(info.path, info.path_reason)


def engine(path: Path, **options: Any) -> EngineCore:
    config = EngineConfig(
        model=str(path),
        transport="inline",
        num_threads=1,
        num_kv_blocks=16,
        max_num_batched_tokens=16,
        max_model_len=MAX_MODEL_LEN,
        **options,
    )
    return EngineCore(config, make_model_runner(config))


def generated(core: EngineCore) -> Generated:
    """Greedy tokens and their logprobs, of all prompts at once, in chunks."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    for i, prompt in enumerate(PROMPTS):
        core.add(InferRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    found: Generated = [([], []) for _ in PROMPTS]
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error
            for entry in output.logprobs:
                found[int(output.request_id)][0].append(entry.token_id)
                found[int(output.request_id)][1].append(entry.logprob)
    core.check()
    core.close()
    return found


@torch.inference_mode()
def assert_transformers(model: Any, found: Generated) -> None:
    for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        assert tokens == logits.argmax(-1).tolist(), "other tokens than those of transformers"
        expected = torch.log_softmax(logits, -1).max(-1).values
        assert torch.allclose(torch.tensor(logprobs), expected, atol=5e-4), "other logprobs than those of transformers"
