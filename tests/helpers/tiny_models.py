"""Tiny random models of every family, and the results of the engine and of `transformers` for a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.module_runner import make_model_runner

PROMPT_LENS = (13, 5, 21, 1, 30, 9)
OUTPUT_TOKENS = 12
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
UNTIED = {"tie_word_embeddings": False}
NEOX = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
OPT = {name: value for name, value in NEOX.items() if name != "intermediate_size"}
WINDOW = {"head_dim": 16, "sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, Any] = {
    "llama": tf.LlamaConfig(**BASE),
    "qwen2": tf.Qwen2Config(**BASE),
    "qwen3": tf.Qwen3Config(**BASE, head_dim=16),
    "mistral": tf.MistralConfig(**BASE, sliding_window=8),
    "gemma2": tf.Gemma2Config(**BASE, **UNTIED, **WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3": tf.Gemma3TextConfig(**BASE, **UNTIED, **WINDOW, **MIXED, query_pre_attn_scalar=16),
    "phi3": tf.Phi3Config(**BASE),
    "gpt2": tf.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None, **UNTIED
    ),
    "qwen3_moe": tf.Qwen3MoeConfig(**BASE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    "mixtral": tf.MixtralConfig(**BASE, num_local_experts=4),
    "olmo2": tf.Olmo2Config(**BASE),
    "gpt_oss": tf.GptOssConfig(**BASE, **WINDOW, **MIXED, num_local_experts=4),
    "gpt_neox": tf.GPTNeoXConfig(**NEOX),
    "opt": tf.OPTConfig(**OPT, **UNTIED, ffn_dim=96, word_embed_proj_dim=64),
    "cohere": tf.CohereConfig(**BASE, logit_scale=0.5),
    "granite": tf.GraniteConfig(**BASE, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.7),
    "starcoder2": tf.Starcoder2Config(**BASE, **UNTIED),
    "smollm3": tf.SmolLM3Config(**BASE),
}


def random_model(config: Any) -> Any:
    """Weights spread wide enough that greedy output does not fall into repeating one token."""
    torch.manual_seed(5)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=1.0 if "emb" in name or "wte" in name else 0.18)
            elif "norm" not in name and "ln_" not in name:
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 128, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def expected_tokens(model: Any, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in output[0, len(prompt) :]]


def engine_tokens(path: Path, **options: Any) -> tuple[list[list[int]], int]:
    """All prompts at once through the engine; the tokens of each, and how often a request was preempted."""
    core = EngineCore(config := EngineConfig(model=str(path), transport="inline", **options), make_model_runner(config))
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts()):
        core.add(InferRequest(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPT_LENS))}
    preemptions = 0
    while core.has_work:
        result = core.step()
        preemptions = result.stats.num_preemptions
        for output in result.outputs:
            assert not output.error
            tokens[output.request_id] += output.token_ids
    core.check()
    core.close()
    return list(tokens.values()), preemptions
