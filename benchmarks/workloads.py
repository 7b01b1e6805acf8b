"""The model shape and the workloads of the comparison with other engines.

For: versus_transformers.py. Does not know: engines. Invariant: a name always means the same checkpoint and the same
requests, since both are drawn from fixed seeds.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

_SEEDS = {"W1": 11, "W2": 22}
_LOWEST_TOKEN, _HIGHEST_TOKEN = 3, 31990
NUM_REQUESTS = 64


def write_checkpoint(directory: Path) -> None:
    """Random bfloat16 weights in the shape of Qwen2.5-0.5B, as safetensors; about 1 GB."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def workload(name: str, num_requests: int = NUM_REQUESTS) -> list[tuple[list[int], int]]:
    """(prompt token ids, number of output tokens) per request; the first `num_requests` of the 64.

    W1: 32 tokens in, 128 out. W2: 16 to 512 in, 16 to 128 out.
    """
    rng = random.Random(_SEEDS[name])
    if name == "W1":
        lengths = [(32, 128)] * NUM_REQUESTS
    else:
        lengths = [(rng.randint(16, 512), rng.randint(16, 128)) for _ in range(NUM_REQUESTS)]
    requests = [([rng.randint(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(n)], outputs) for n, outputs in lengths]
    return requests[:num_requests]


def write_workload(name: str, path: Path, num_requests: int, max_output_tokens: int) -> None:
    """The workload as a file for `llmbackend bench`."""
    items = [
        {"prompt_token_ids": prompt, "output_tokens": min(outputs, max_output_tokens)}
        for prompt, outputs in workload(name, num_requests)
    ]
    path.write_text(json.dumps(items))
