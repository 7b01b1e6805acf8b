"""The families of models that are served, what computes each on a CPU, and a tiny random model of each.

docs/models.md shows this table, which a test holds to it. To make a family native, set its `why` to "".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.gguf import families as gguf_families

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED: Final = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_SCALED_QUERIES: Final = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
_FACTORS: Final = {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
_COHERE: Final = "Command R+, with norms of its own over heads, as modules"
_LEARNED: Final = "learned positions"
_MIXED_HEADS: Final = "query, key and value of a head side by side in one matrix"
_GLM_GROUPS: Final = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
_OWN_CHOICE: Final = "experts chosen in a way of its own"
_IDS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
HEAD_DIMS: Final = (64, 128)


@dataclass(frozen=True, slots=True)
class Family:
    model_type: str
    models: str
    """Known ones, for the docs."""
    why: str = ""
    """Why modules compute it, the start of what the server says; "": the native program does."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of its config, beyond the sizes."""
    has_head_dim: bool = True
    """Whether its config states the size of a head apart from the model's width."""
    note: str = ""
    """For the docs."""

    @property
    def is_native(self) -> bool:
        return not self.why

    def config(self, head_dim: int) -> Any:
        """Of heads of this size, two for each of keys and values."""
        config_class = tf.CONFIG_MAPPING[self.model_type]
        known = vars(config_class())
        sizes = _SIZES | {"hidden_size": 4 * head_dim, "head_dim": head_dim}
        if not self.has_head_dim:
            del sizes["head_dim"]
        experts = {name: value for name, value in _EXPERTS.items() if name in known}
        return config_class(**(sizes | experts | self.changes))


FAMILIES: Final = (
    Family("llama", "Llama 2 and 3, SmolLM2, TinyLlama, Yi, many others"),
    Family("mistral", "Mistral 7B, Nemo", changes={"sliding_window": 8}),
    Family("ministral", "Ministral 8B", changes=_MIXED),
    Family("ministral3", "Ministral 3, as text", changes={"rope_parameters": _SCALED_QUERIES}),
    Family("qwen2", "Qwen2, Qwen2.5, QwQ"),
    Family("qwen3", "Qwen3"),
    Family("gemma", "Gemma"),
    Family("gemma2", "Gemma 2", changes={"sliding_window": 8, "attn_logit_softcapping": 2.0}),
    Family("gemma3_text", "Gemma 3, as text", changes=_MIXED),
    Family("vaultgemma", "VaultGemma", changes=_MIXED),
    Family("phi", "Phi 1, 1.5, 2", changes={"partial_rotary_factor": 0.5}, note="Phi 2, with heads of 80, as modules"),
    Family("phi3", "Phi 3, 3.5, 4"),
    Family("olmo", "OLMo"),
    Family("olmo2", "OLMo 2"),
    Family("olmo3", "OLMo 3", changes=_MIXED),
    Family("granite", "Granite 3, dense", changes=_FACTORS),
    Family("smollm3", "SmolLM3", changes={"no_rope_layers": [1, 0]}),
    Family("ernie4_5", "ERNIE 4.5, dense"),
    Family("glm", "GLM-4 9B"),
    Family("glm4", "GLM-4 0414, GLM-Z1"),
    Family("cohere", "Command R", changes={"logit_scale": 0.5}, note=_COHERE),
    Family("cohere2", "Command R7B, Command A", changes=_MIXED | {"logit_scale": 0.5}),
    Family("stablelm", "StableLM", changes={"partial_rotary_factor": 0.25}, has_head_dim=False),
    Family("starcoder2", "StarCoder2"),
    Family("nemotron", "Nemotron 3, 4, Minitron"),
    Family("exaone4", "EXAONE 4", changes=_MIXED),
    Family("seed_oss", "Seed-OSS"),
    Family("hunyuan_v1_dense", "Hunyuan, dense"),
    Family("helium", "Helium"),
    Family("arcee", "AFM 4.5B"),
    Family("internlm3", "InternLM3"),
    Family("iquestcoder", "IQuest-Coder"),
    Family("jais2", "Jais 2"),
    Family("hyperclovax", "HyperCLOVA X SEED", changes=_FACTORS),
    Family("cwm", "Code World Model", changes=_MIXED | _IDS),
    Family("apertus", "Apertus", "ApertusMLP activates by XIELUActivation", note="xIELU, which has numbers of its own"),
    Family("bitnet", "BitNet b1.58", "BitNetAttention consists of", note="norms within attention and MLP"),
    Family("granite_swa", "Granite with windows", "GraniteSWAModel consists of", _MIXED, note="rotary tables by layer"),
    Family("nanochat", "nanochat", "NanoChatAttention turns its heads", note="heads turned the other way"),
    Family("gpt2", "GPT-2", "GPT2LMHeadModel consists of", has_head_dim=False, note=_LEARNED),
    Family("gpt_bigcode", "StarCoder", "GPTBigCodeForCausalLM consists of", has_head_dim=False, note=_LEARNED),
    Family("gpt_neox", "Pythia, GPT-NeoX", "GPTNeoXForCausalLM consists of", has_head_dim=False, note=_MIXED_HEADS),
    Family("persimmon", "Persimmon", "PersimmonAttention consists of", has_head_dim=False, note=_MIXED_HEADS),
    Family("opt", "OPT", "OPTModel consists of", changes={"ffn_dim": 192}, has_head_dim=False, note=_LEARNED),
    Family("biogpt", "BioGPT", "BioGptForCausalLM consists of", has_head_dim=False, note=_LEARNED),
    Family("qwen3_moe", "Qwen3 30B-A3B, 235B-A22B"),
    Family("qwen2_moe", "Qwen1.5-MoE, Qwen2 57B-A14B"),
    Family("gpt_oss", "gpt-oss", changes=_MIXED),
    Family("mixtral", "Mixtral"),
    Family("olmoe", "OLMoE"),
    Family("granitemoe", "Granite 3, with experts"),
    Family("glm4_moe", "GLM-4.5, 4.6", changes=_GLM_GROUPS),
    Family("ernie4_5_moe", "ERNIE 4.5, with experts", "Ernie4_5_MoeTopKRouter has", note=_OWN_CHOICE),
    Family("phimoe", "Phi 3.5 MoE", "PhimoeTopKRouter chooses experts", note=_OWN_CHOICE),
    Family("hunyuan_v1_moe", "Hunyuan A13B", "its layers have experts that are not packed", note=_OWN_CHOICE),
    Family("flex_olmo", "FlexOlmo"),
)  # fmt: skip
NATIVE: Final = tuple(family for family in FAMILIES if family.is_native)

PROMPTS: Final = tuple(
    tuple((step * i + 3) % 128 for i in range(length)) for step, length in ((7, 23), (11, 5), (3, 14))
)
OUTPUT_TOKENS: Final = 8
Generated = list[tuple[list[int], list[float]]]


def save_model(family: Family, head_dim: int, path: Path) -> Any:
    """A random model whose every part shows in its logits, written to `path`."""
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(family.config(head_dim), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _spread(name, parameter)
    model.save_pretrained(path)
    return model


def _spread(name: str, parameter: torch.Tensor) -> None:
    draw = torch.randn_like(parameter)
    if parameter.dim() > 1:
        parameter.copy_(draw * (1.0 if "emb" in name else 2.0 * parameter.shape[-1] ** -0.5))
    else:
        parameter.add_(0.2 * draw)


def engine(path: Path, **options: Any) -> EngineCore:
    config = EngineConfig(
        model=str(path), transport="inline", num_threads=1, num_kv_blocks=16, max_num_batched_tokens=16, **options
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
        assert tokens == logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, -1).max(-1).values
        assert torch.allclose(torch.tensor(logprobs), expected, atol=5e-4)


def rows_of_docs() -> Iterator[str]:
    """The table of docs/models.md."""
    of_llama = {"mistral", "mixtral"}
    gguf = of_llama | {family.model_type for family in gguf_families.FAMILIES.values()}
    yield "| family | models | computed by | why modules | GGUF |"
    yield "|---|---|---|---|---|"
    for family in sorted(FAMILIES, key=lambda each: (not each.is_native, each.note == _OWN_CHOICE, each.model_type)):
        how = "native program" if family.is_native else "modules"
        why = family.note or family.why
        has_gguf = "yes" if family.model_type in gguf else ""
        yield f"| `{family.model_type}` | {family.models} | {how} | {why} | {has_gguf} |"
