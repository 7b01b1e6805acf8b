"""The families of models whose GGUF files are read, and which tensor of a file is which of the model.

Does not know: types, values. Invariant: a tensor of the file that no rule names keeps its name, by which the check of
the checkpoint refuses it. Source: llama.cpp's conversion, which this undoes: it orders the rows of queries and keys by
pairs for rotary embeddings, adds 1 to Gemma's norms, and may join queries, keys and values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .errors import GgufError, short
from .fields import Fields
from .files import read_parts, stamp
from .header import Header, TensorInfo

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA: Final = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MOE: Final = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Matrices of all experts in one tensor, [experts, rows, columns]."""
_MOST_EXPERTS: Final = 1024
_PHI: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME: Final = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)")
_IN_THE_CONFIG: Final = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_JOINED: Final = "attn_qkv"


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    """The field `general.architecture`."""
    model_type: str
    """transformers' name, as the next one."""
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    """Of a layer's tensors, where they differ from Llama's."""
    by_pairs: bool = False
    """Whether the rows of queries and keys are ordered by pairs."""
    adds_one: bool = False
    """Whether norms have 1 added."""
    has_experts: bool = False

    def layer_name(self, name: str) -> str | None:
        return self.names.get(name) or _LAYER.get(name)


FAMILIES: Final = {
    family.architecture: family
    for family in (
        Family("llama", "llama", "LlamaForCausalLM", by_pairs=True),
        Family("qwen2", "qwen2", "Qwen2ForCausalLM"),
        Family("qwen3", "qwen3", "Qwen3ForCausalLM"),
        Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _MOE, has_experts=True),
        Family("gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA, adds_one=True),
        Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA, adds_one=True),
        Family("phi3", "phi3", "Phi3ForCausalLM", _PHI),
        Family("granite", "granite", "GraniteForCausalLM", by_pairs=True),
        Family("smollm3", "smollm3", "SmolLM3ForCausalLM", by_pairs=True),
    )
}


def family_of(header: Header) -> Family:
    """Raises GgufError."""
    name = Fields(header.fields).text("general.architecture")
    if name not in FAMILIES:
        raise GgufError(f"its architecture is '{short(name)}', expected one of: {', '.join(FAMILIES)}")
    return FAMILIES[name]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model as rows of one in the file."""

    name: str
    """In the file."""
    info: TensorInfo
    first_row: int
    num_rows: int
    num_heads: int = 0
    """Whose rows are ordered by pairs; 0: none are."""
    plus: float = 0.0
    """To be added to the values."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.info.shape[-1:]) if len(self.info.shape) > 1 else (self.num_rows,)


def tensors_of(files: Sequence[Path]) -> dict[str, ModelTensor]:
    """By the model's names, of all parts. The last model's are remembered as long as its files are the same: its
    header is mostly vocabulary, and passing over it takes time. Raises GgufError or OSError."""
    return dict(_tensors_of(tuple((path, stamp(path)) for path in files)))


@functools.lru_cache(maxsize=1)
def _tensors_of(stamped: tuple[tuple[Path, tuple[int, ...]], ...]) -> dict[str, ModelTensor]:
    return model_tensors(read_parts([path for path, _ in stamped]))


def model_tensors(header: Header) -> dict[str, ModelTensor]:
    """By the model's names. Raises GgufError."""
    family = family_of(header)
    fields = Fields(header.fields, family.architecture)
    num_heads = fields.integer("attention.head_count")
    heads = {"q": num_heads, "k": fields.integer("attention.head_count_kv", num_heads), "v": 0}
    found: dict[str, ModelTensor] = {}
    for name, info in header.tensors.items():
        if not _IN_THE_CONFIG.fullmatch(name):
            for model_name, tensor in _pieces(family, name, info, heads):
                if model_name in found:
                    first, second = short(found[model_name].name), short(name)
                    raise GgufError(f"its tensors '{first}' and '{second}' are both '{model_name}'")
                found[model_name] = tensor
    return found


def _pieces(family: Family, name: str, info: TensorInfo, heads: Mapping[str, int]) -> Iterator[tuple[str, ModelTensor]]:
    match = _NAME.fullmatch(name)
    layer, part, kind = match.groups() if match else (None, "", "")
    if layer is not None and part == _JOINED and family.layer_name(part) is None:
        yield from _joined(family, name, info, heads, f"model.layers.{int(layer)}.self_attn", kind)
        return
    if layer is not None and family.has_experts and part in _EXPERTS:
        yield from _of_experts(name, info, f"model.layers.{int(layer)}.mlp.experts", f"{_EXPERTS[part]}.{kind}")
        return
    inner = family.layer_name(part) if layer is not None else _TOP.get(part)
    if inner is None:
        yield name, ModelTensor(name, info, 0, info.shape[0])
        return
    outer = f"model.layers.{int(layer)}.{inner}" if layer is not None else inner
    num_heads = heads.get(part.removeprefix("attn_"), 0) if family.by_pairs else 0
    _check_heads(name, info.shape[0], num_heads)
    plus = -1.0 if family.adds_one and kind == "weight" and part.endswith("norm") else 0.0
    yield f"{outer}.{kind}", ModelTensor(name, info, 0, info.shape[0], num_heads, plus)


def _of_experts(name: str, info: TensorInfo, outer: str, inner: str) -> Iterator[tuple[str, ModelTensor]]:
    if len(info.shape) != 3 or info.shape[0] > _MOST_EXPERTS:
        raise GgufError(
            f"its tensor '{short(name)}' is {list(info.shape)}, expected a matrix for each of at most {_MOST_EXPERTS} "
            "experts"
        )
    count, num_rows = info.shape[:2]
    for expert in range(count):
        yield f"{outer}.{expert}.{inner}", ModelTensor(name, info, expert * num_rows, num_rows)


def _joined(
    family: Family, name: str, info: TensorInfo, heads: Mapping[str, int], outer: str, kind: str
) -> Iterator[tuple[str, ModelTensor]]:
    """Queries, keys and values, one above the other, of heads of the same width."""
    sizes = {"q": heads["q"], "k": heads["k"], "v": heads["k"]}
    width, rest = divmod(info.shape[0], sum(sizes.values()))
    if rest:
        raise GgufError(
            f"its tensor '{short(name)}' has {info.shape[0]} rows, expected a multiple of {sum(sizes.values())}"
        )
    first = 0
    for part, count in sizes.items():
        num_heads = heads[part] if family.by_pairs else 0
        _check_heads(name, count * width, num_heads)
        yield f"{outer}.{part}_proj.{kind}", ModelTensor(name, info, first, count * width, num_heads)
        first += count * width


def _check_heads(name: str, num_rows: int, num_heads: int) -> None:
    if num_heads and num_rows % (2 * num_heads):
        raise GgufError(f"its tensor '{short(name)}' has {num_rows} rows, expected a multiple of {2 * num_heads}")
