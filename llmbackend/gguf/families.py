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
_GPT_OSS: Final = {
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Matrices of all experts in one tensor, [experts, rows, columns], or their biases, [experts, rows]."""
_MOST_EXPERTS: Final = 1024
_OF_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PARAMETERS: Final = {"self_attn.sinks"}
"""Of a module that has no weight or bias."""
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
    transposes_experts: bool = False
    """Whether transformers has their matrices as [inputs, outputs]."""

    def layer_name(self, name: str) -> str | None:
        return self.names.get(name) or _LAYER.get(name)


FAMILIES: Final = {
    family.architecture: family
    for family in (
        Family("llama", "llama", "LlamaForCausalLM", by_pairs=True),
        Family("qwen2", "qwen2", "Qwen2ForCausalLM"),
        Family("qwen3", "qwen3", "Qwen3ForCausalLM"),
        Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _MOE, has_experts=True),
        Family("olmoe", "olmoe", "OlmoeForCausalLM", _MOE, has_experts=True),
        Family("gpt-oss", "gpt_oss", "GptOssForCausalLM", _GPT_OSS, has_experts=True, transposes_experts=True),
        Family("gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA, adds_one=True),
        Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA, adds_one=True),
        Family("phi3", "phi3", "Phi3ForCausalLM", _PHI),
        Family("granite", "granite", "GraniteForCausalLM", by_pairs=True),
        Family("smollm3", "smollm3", "SmolLM3ForCausalLM", by_pairs=True),
    )
}
_MIXTRAL: Final = Family("llama", "mixtral", "MixtralForCausalLM", _MOE, by_pairs=True, has_experts=True)
"""A Llama with experts."""


def family_of(header: Header) -> Family:
    """Raises GgufError."""
    name = Fields(header.fields).text("general.architecture")
    if name not in FAMILIES:
        raise GgufError(f"its architecture is '{short(name)}', expected one of: {', '.join(FAMILIES)}")
    is_mixtral = name == _MIXTRAL.architecture and Fields(header.fields, name).integer("expert_count", 0, least=0)
    return _MIXTRAL if is_mixtral else FAMILIES[name]


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
    """By the model's names, of all parts; of experts one by one. The last model's are remembered as long as its files
    are the same: its header is mostly vocabulary, and passing over it takes time. Raises GgufError or OSError."""
    return dict(_read(files)[1])


def shapes_of(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Of the parameters of transformers' modules, which have all experts in one. As `tensors_of`."""
    family, tensors = _read(files)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if match := _OF_EXPERT.fullmatch(name):
            outer, expert, part, kind = match.groups()
            ending = "down_proj" if part == "down" else "gate_up_proj"
            n, k = tensor.shape if kind == "weight" else tensor.shape[::-1]
            n *= 1 if part == "down" else 2
            matrix = (k, n) if family.transposes_experts else (n, k)
            whole = f"{outer}.{ending}" if kind == "weight" else f"{outer}.{ending}_bias"
            shapes[whole] = (int(expert) + 1, *(matrix if kind == "weight" else (n,)))
        else:
            shapes[name] = tensor.shape
    return shapes


def _read(files: Sequence[Path]) -> tuple[Family, dict[str, ModelTensor]]:
    return _read_stamped(tuple((path, stamp(path)) for path in files))


@functools.lru_cache(maxsize=1)
def _read_stamped(stamped: tuple[tuple[Path, tuple[int, ...]], ...]) -> tuple[Family, dict[str, ModelTensor]]:
    header = read_parts([path for path, _ in stamped])
    return family_of(header), model_tensors(header)


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
        yield from _of_experts(name, info, f"model.layers.{int(layer)}.mlp.experts", _EXPERTS[part], kind)
        return
    inner = family.layer_name(part) if layer is not None else _TOP.get(part)
    if inner is None:
        yield name, ModelTensor(name, info, 0, info.shape[0])
        return
    outer = f"model.layers.{int(layer)}.{inner}" if layer is not None else inner
    num_heads = heads.get(part.removeprefix("attn_"), 0) if family.by_pairs else 0
    _check_heads(name, info.shape[0], num_heads)
    plus = -1.0 if family.adds_one and kind == "weight" and part.endswith("norm") else 0.0
    model_name = outer if inner in _PARAMETERS else f"{outer}.{kind}"
    yield model_name, ModelTensor(name, info, 0, info.shape[0], num_heads, plus)


def _of_experts(name: str, info: TensorInfo, outer: str, inner: str, kind: str) -> Iterator[tuple[str, ModelTensor]]:
    what, num_dimensions = ("a matrix", 3) if kind == "weight" else ("a vector", 2)
    if len(info.shape) != num_dimensions or info.shape[0] > _MOST_EXPERTS:
        raise GgufError(
            f"its tensor '{short(name)}' is {list(info.shape)}, expected {what} for each of at most {_MOST_EXPERTS} "
            "experts"
        )
    num_rows = info.shape[1] if kind == "weight" else 1
    for expert in range(info.shape[0]):
        yield f"{outer}.{expert}.{inner}.{kind}", ModelTensor(name, info, expert * num_rows, num_rows)


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
