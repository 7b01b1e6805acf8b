"""Start weights that can already copy: a previous-token head and an induction head, planted before training.

For: `train_demo_model.py`. A model this small needs tens of millions of tokens before it finds out by itself that "what
followed this token earlier is likely to follow it now"; minutes on two CPU cores do not give it that many. So the two
heads that do it (Olsson et al., 2022) are written into a fresh Llama, and training goes on from there. Does not know:
tokenizers, text. Invariant: every other weight keeps its random start.

How: each token gets a random code of ±1 in CODE dimensions of its embedding, and all tokens one constant dimension.
Head 0 of layer 0 turns its constant query and key by the rotary angle of one position, so that it looks at the token
before, and copies that token's code to spare dimensions. Head 0 of layer 1 asks with a token's own code for positions
whose previous token has it, in rotary pairs too slow to matter, and adds the code found there to the residual stream,
where the tied output head reads it as the next token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

EMBEDDING_SCALE = 0.03
CONSTANT = 3.0
CODE = 64
OWN = slice(1, 1 + CODE)
PREVIOUS = slice(1 + CODE, 1 + 2 * CODE)
FAST_PAIRS = range(9)
SLOW_PAIRS = range(16, 32)
PREVIOUS_SHARPNESS = 3.0
MATCH_SHARPNESS = 1.4
COPY_GAIN = 4.0
OUTPUT_GAIN = 3.0
OTHER_OUTPUTS = 0.1


@torch.no_grad()
def plant_copy_circuit(model: LlamaForCausalLM) -> None:
    """Writes the circuit into `model`, which needs head_dim 64, a hidden size of at least 160, at least two layers and
    tied embeddings."""
    embedding = model.model.embed_tokens.weight
    _encode_tokens(embedding)
    for layer in model.model.layers:  # their other outputs must be small beside the embeddings at the start
        layer.self_attn.o_proj.weight.mul_(OTHER_OUTPUTS)
        layer.mlp.down_proj.weight.mul_(OTHER_OUTPUTS)
    first, second = model.model.layers[0], model.model.layers[1]
    _look_back(first.self_attn, model.config.rope_parameters["rope_theta"])
    _look_up(second.self_attn)
    for layer in (first, second):
        layer.input_layernorm.weight.fill_(1.0)
    model.model.norm.weight.fill_(OUTPUT_GAIN)


def _encode_tokens(embedding: torch.Tensor) -> None:
    embedding.normal_(0, 0.5 * EMBEDDING_SCALE)
    embedding[:, 0] = CONSTANT * EMBEDDING_SCALE
    embedding[:, OWN] = EMBEDDING_SCALE * (2.0 * torch.randint(0, 2, (embedding.shape[0], CODE)) - 1.0)
    embedding[:, PREVIOUS] = 0.0


def _look_back(attention: torch.nn.Module, rope_theta: float) -> None:
    """Head 0: query and key from the constant, a rotary step of one position apart; value from the own code."""
    query, key, value, output = _head_zero(attention)
    for pair in FAST_PAIRS:
        angle = torch.tensor(rope_theta ** (-pair / 32))
        query[pair, 0] = PREVIOUS_SHARPNESS
        key[pair, 0] = PREVIOUS_SHARPNESS * torch.cos(angle)
        key[pair + 32, 0] = PREVIOUS_SHARPNESS * torch.sin(angle)
    value[:, OWN] = torch.eye(CODE)
    output[PREVIOUS] = torch.eye(CODE) * EMBEDDING_SCALE


def _look_up(attention: torch.nn.Module) -> None:
    """Head 0: query from the own code, key from the previous token's; value from the own code, added to the output."""
    query, key, value, output = _head_zero(attention)
    rows = [*SLOW_PAIRS, *(pair + 32 for pair in SLOW_PAIRS)]
    projection = MATCH_SHARPNESS * torch.randn(len(rows), CODE) / CODE**0.5
    query[rows, OWN] = projection
    key[rows, PREVIOUS] = projection
    value[:, OWN] = torch.eye(CODE)
    output[OWN] = torch.eye(CODE) * EMBEDDING_SCALE * COPY_GAIN


def _head_zero(attention: Any) -> tuple[torch.Tensor, ...]:
    """Views of head 0's part of the projections, cleared: query, key, value [64, hidden], output [hidden, 64]."""
    views = (
        attention.q_proj.weight[:CODE],
        attention.k_proj.weight[:CODE],
        attention.v_proj.weight[:CODE],
        attention.o_proj.weight[:, :CODE],
    )
    for view in views:
        view.zero_()
    return views
