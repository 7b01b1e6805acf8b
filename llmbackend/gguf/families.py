"""The supported model families of GGUF files, and the mapping of a file's tensors to the model's.

Invariant: a tensor of the file that no rule matches keeps its name, so that the checkpoint check refuses it. Source:
llama.cpp's conversion, which this reverses: it reorders rows and columns (orders.py), adds 1 to norms of Gemma and
Qwen3.5, stores a recurrence's decay instead of its logarithm, may merge queries, keys and values, and may separate a
gate from its up projection, or the key part of a latent up-projection from its value part.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from .errors import GgufError, short
from .fields import Fields
from .files import read_parts, stamp
from .header import Header, TensorInfo
from .orders import Order, Pairs, Turns

Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]

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
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
}
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Matrices of all experts in one tensor, [experts, rows, columns], or their biases, [experts, rows]."""
_MOST_EXPERTS: Final = 1024
_OF_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
MAX_LAYERS: Final = 1024
_PHI: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LFM2: Final = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "token_embd_norm": "model.embedding_norm",
}
_QWEN35: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_SHARED_EXPERT: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DEEPSEEK: Final = {
    **_MOE,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_KEYS, _VALUES = "attn_k_b", "attn_v_b"
"""The parts of `attn_kv_b` in newer files: for each head, the transposed matrix for keys, and the one for values."""
_MOST_HEADS: Final = 1024


def _mamba(outer: str) -> dict[str, str]:
    inner = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
    inner |= {"a": "A_log", "d": "D", "dt.bias": "dt_bias"}
    return {f"ssm_{part}": f"{outer}.{name}" for part, name in inner.items()}


_SEPARATE: Final = {
    "ffn_norm": "pre_ff_layernorm.weight",  # Falcon-H1's, without a suffix
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "output_norm": "model.final_layernorm",
}
_GRANITE_HYBRID: Final = {
    "ffn_gate_inp": "block_sparse_moe.router",
    **{f"ffn_{part}{ending}": "shared_mlp.input_linear" for part in ("gate", "up") for ending in ("", "_shexp")},
    **{f"ffn_down{ending}": "shared_mlp.output_linear" for ending in ("", "_shexp")},
}
_NEMOTRON_H: Final = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
}
_NEMOTRON_H_MOE: Final = {
    **_NEMOTRON_H,
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_CONVOLUTIONS: Final = ("shortconv.conv", "ssm_conv1d")
_FLAT: Final = ("ssm_a", "ssm_d", "ssm_norm")
"""Vectors that files may store as matrices."""
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME: Final = re.compile(r"(?:blk\.(\d{1,4})\.)?([\w.]+?)(?:\.(weight|bias))?")
_IN_THE_CONFIG: Final = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_JOINED: Final = "attn_qkv"


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    """The field `general.architecture`."""
    model_type: str
    """transformers' name, like the next one."""
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's tensors that differ from Llama's."""
    by_pairs: bool = False
    """Whether the rows of queries and keys are ordered by rotary pairs."""
    adds_one: bool = False
    """Whether 1 was added to norms, except those of recurrences."""
    experts: str = ""
    """The experts' module within a layer; "" = none."""
    transposes_experts: bool = False
    """Whether transformers stores their matrices as [inputs, outputs]."""
    takes_turns: bool = False
    """Whether a recurrence's value heads are interleaved (orders.Turns)."""

    @property
    def has_experts(self) -> bool:
        return bool(self.experts)

    def name(self, part: str, kind: str | None, of_layer: bool) -> str | None:
        """The name of the model's tensor, within its layer."""
        whole = part if kind is None else f"{part}.{kind}"
        if whole in self.names:
            return self.names[whole]
        inner = self.names.get(part) or (_LAYER if of_layer else _TOP).get(part)
        return None if inner is None or kind is None else f"{inner}.{kind}"


FAMILIES: Final = {
    family.architecture: family
    for family in (
        Family("llama", "llama", "LlamaForCausalLM", by_pairs=True),
        Family("qwen2", "qwen2", "Qwen2ForCausalLM"),
        Family("qwen3", "qwen3", "Qwen3ForCausalLM"),
        Family("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM", _MOE | _SHARED_EXPERT, experts="mlp.experts"),
        Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _MOE, experts="mlp.experts"),
        Family("olmoe", "olmoe", "OlmoeForCausalLM", _MOE, experts="mlp.experts"),
        Family("gpt-oss", "gpt_oss", "GptOssForCausalLM", _GPT_OSS, experts="mlp.experts", transposes_experts=True),
        Family("gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA, adds_one=True),
        Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA, adds_one=True),
        Family("phi3", "phi3", "Phi3ForCausalLM", _PHI),
        Family("granite", "granite", "GraniteForCausalLM", by_pairs=True),
        Family("smollm3", "smollm3", "SmolLM3ForCausalLM", by_pairs=True),
        Family("lfm2", "lfm2", "Lfm2ForCausalLM", _LFM2),
        Family(
            "granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", _mamba("mamba") | _GRANITE_HYBRID,
            by_pairs=True, experts="block_sparse_moe.experts",
        ),
        Family("falcon-h1", "falcon_h1", "FalconH1ForCausalLM", _mamba("mamba") | _SEPARATE),
        Family("nemotron_h", "nemotron_h", "NemotronHForCausalLM", _mamba("mixer") | _NEMOTRON_H, by_pairs=True),
        Family(
            "nemotron_h_moe", "nemotron_h", "NemotronHForCausalLM", _mamba("mixer") | _NEMOTRON_H_MOE, by_pairs=True,
            experts="mixer.experts",
        ),
        Family("deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM", _DEEPSEEK, experts="mlp.experts"),
        Family("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN35, adds_one=True, takes_turns=True),
        Family(
            "qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _QWEN35 | _MOE | _SHARED_EXPERT,
            adds_one=True, experts="mlp.experts", takes_turns=True,
        ),
    )
}  # fmt: skip
_MIXTRAL: Final = Family("llama", "mixtral", "MixtralForCausalLM", _MOE, by_pairs=True, experts="mlp.experts")
_DEEPSEEK_V2: Final = Family("deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM", _DEEPSEEK, experts="mlp.experts")
"""With softmax routing; V3 and later use sigmoids and a correction bias."""
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""
_BAMBA: Final = Family("granitehybrid", "bamba", "BambaForCausalLM", _mamba("mamba") | _SEPARATE, by_pairs=True)
"""A Granite hybrid with rotary attention."""


def family_of(header: Header) -> Family:
    """Raises GgufError."""
    name = Fields(header.fields).text("general.architecture")
    if name not in FAMILIES:
        raise GgufError(f"its architecture is '{short(name)}', expected one of: {', '.join(FAMILIES)}")
    fields = Fields(header.fields, name)
    if name == _MIXTRAL.architecture and fields.integer("expert_count", 0, least=0):
        return _MIXTRAL
    if name == _DEEPSEEK_V2.architecture:
        usual = SIGMOID if any(tensor.endswith(".exp_probs_b.bias") for tensor in header.tensors) else SOFTMAX
        chosen_by = fields.integer("expert_gating_func", 0, least=0) or usual
        return FAMILIES[name] if chosen_by == SIGMOID else _DEEPSEEK_V2
    if name == _BAMBA.architecture and fields.boolean("rope.scaling.finetuned", True):
        return _BAMBA
    return FAMILIES[name]


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model, as rows of one in the file."""

    name: str
    """In the file."""
    info: TensorInfo
    first_row: int
    num_rows: int
    shape: Shape
    """In the model."""
    rows: Order | None = None
    """None = as in the file."""
    columns: Order | None = None
    undo: Callable[[Floats], Floats] | None = None
    """Converts the file's values to the model's."""
    below: ModelTensor | None = None
    """The tensor whose rows follow, if the file splits the model's tensor."""
    is_transposed: bool = False
    """Whether the file stores the model's columns as rows."""

    @property
    def pieces(self) -> list[ModelTensor]:
        found = [self]
        while (below := found[-1].below) is not None:
            found.append(below)
        return found

    @property
    def whole_shape(self) -> Shape:
        return sum(piece.shape[0] for piece in self.pieces), *self.shape[1:]


def num_layers(fields: Fields) -> int:
    """Excludes the layers after these that only draft further tokens."""
    count = fields.integer("block_count", most=MAX_LAYERS)
    return count - fields.integer("nextn_predict_layers", 0, least=0, most=count - 1)


def tensors_of(files: Sequence[Path]) -> dict[str, ModelTensor]:
    """By the model's names, from all parts, with experts individually. The last model's are cached while its files are
    unchanged: skipping the vocabulary, most of the header, takes time. Raises GgufError or OSError."""
    return dict(_read(files)[1])


def shapes_of(files: Sequence[Path]) -> dict[str, Shape]:
    """Shapes of the parameters of transformers' modules, which store all experts in one. Raises as `tensors_of`."""
    family, tensors = _read(files)
    shapes: dict[str, Shape] = {}
    for name, tensor in tensors.items():
        if match := _OF_EXPERT.fullmatch(name):
            outer, expert, part, kind = match.groups()
            has_gate = part != "down" and f"{outer}.0.gate_proj.{kind}" in tensors
            whole = f"{outer}.{'gate_up' if has_gate else part}_proj"
            n = tensor.shape[0] * (2 if has_gate else 1)
            if kind == "bias":
                shapes[f"{whole}_bias"] = (int(expert) + 1, n)
            else:
                k = tensor.shape[1]
                shapes[whole] = (int(expert) + 1, *((k, n) if family.transposes_experts else (n, k)))
        else:
            shapes[name] = tensor.whole_shape
    return shapes


def _read(files: Sequence[Path]) -> tuple[Family, dict[str, ModelTensor]]:
    return _read_stamped(tuple((path, stamp(path)) for path in files))


@functools.lru_cache(maxsize=1)
def _read_stamped(stamped: tuple[tuple[Path, tuple[int, ...]], ...]) -> tuple[Family, dict[str, ModelTensor]]:
    header = read_parts([path for path, _ in stamped])
    return family_of(header), model_tensors(header)


def model_tensors(header: Header) -> dict[str, ModelTensor]:
    """By the model's names. Raises GgufError."""
    file = _File(header)
    found: dict[str, ModelTensor] = {}
    for name, info in header.tensors.items():
        for model_name, tensor in file.pieces(name, info):
            if model_name in found:
                tensor = _stacked(model_name, found[model_name], tensor)
            found[model_name] = tensor
    return found


def _stacked(model_name: str, first: ModelTensor, second: ModelTensor) -> ModelTensor:
    """A gate and its up projection, in either order."""
    gate, up = sorted((first, second), key=lambda tensor: tensor.name)
    is_a_pair = first.below is None and "ffn_gate" in gate.name and up.name == gate.name.replace("gate", "up")
    if not (is_a_pair and gate.shape == up.shape):
        raise GgufError(f"its tensors '{short(first.name)}' and '{short(second.name)}' are both '{model_name}'")
    return replace(gate, below=up)


class _File:
    """What is needed of a header to map its tensor names."""

    def __init__(self, header: Header) -> None:
        self.family = family_of(header)
        self._tensors = header.tensors
        fields = Fields(header.fields, self.family.architecture)
        self.num_layers = num_layers(fields) if fields.has("nextn_predict_layers") else MAX_LAYERS
        heads = fields.integer("attention.head_count")
        self.heads = {"q": heads, "k": fields.common("attention.head_count_kv", heads)}
        self.rows: dict[str, Order] = {}
        self.columns: dict[str, Order] = {}
        if self.family.by_pairs:
            self.rows = {f"attn_{part}": Pairs(count) for part, count in self.heads.items()}
        if self.family.takes_turns:
            self._take_turns(fields)

    def _take_turns(self, fields: Fields) -> None:
        key_heads, heads = fields.integer("ssm.group_count"), fields.integer("ssm.time_step_rank")
        if heads == key_heads:
            return
        width = max(fields.integer("ssm.inner_size") // heads, 1)
        with_keys = Turns(2 * key_heads * fields.integer("ssm.state_size"), key_heads, width)
        self.rows = {"attn_qkv": with_keys, "ssm_conv1d": with_keys, "attn_gate": Turns(0, key_heads, width)}
        self.rows |= dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), Turns(0, key_heads, 1))
        self.columns = {"ssm_out": Turns(0, key_heads, width)}

    def pieces(self, name: str, info: TensorInfo) -> Iterator[tuple[str, ModelTensor]]:
        """The model's tensors in this one, by name."""
        match = _NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, name, None)
        if _IN_THE_CONFIG.fullmatch(name) or (layer is not None and int(layer) >= self.num_layers):
            return
        outer = "" if layer is None else f"model.layers.{int(layer)}."
        inner = self.family.name(part, kind, of_layer=layer is not None)
        if layer is not None and part == _JOINED and inner is None:
            yield from self._joined(name, info, f"{outer}self_attn", kind)
        elif layer is not None and self.family.has_experts and part in _EXPERTS:
            yield from _of_experts(name, info, outer + self.family.experts, _EXPERTS[part], kind)
        elif part == _KEYS and self.family.names is _DEEPSEEK:
            yield f"{outer}self_attn.kv_b_proj.weight", self._of_heads(name, info)
        elif part == _VALUES and self.family.names is _DEEPSEEK and name.replace(_VALUES, _KEYS) in self._tensors:
            return
        elif inner is None:
            yield name, ModelTensor(name, info, 0, info.shape[0], info.shape)
        else:
            yield outer + inner, self._whole(name, info, part)

    def _whole(self, name: str, info: TensorInfo, part: str) -> ModelTensor:
        rows, columns = self.rows.get(part), self.columns.get(part) if len(info.shape) > 1 else None
        _check_order(name, "rows", info.shape[0], rows)
        _check_order(name, "columns", info.shape[-1], columns)
        undo: Callable[[Floats], Floats] | None = None
        if self.family.adds_one and part.endswith("norm") and part != "ssm_norm":
            undo = _minus_one
        elif part == "ssm_a":
            undo = _log_of_negative
        return ModelTensor(name, info, 0, info.shape[0], _model_shape(part, info.shape), rows, columns, undo)

    def _of_heads(self, name: str, keys: TensorInfo) -> ModelTensor:
        """For each head the rows for keys, followed by those for values."""
        values_name = name.replace(_KEYS, _VALUES)
        values, heads = self._tensors.get(values_name), self.heads["q"]
        fits = values is not None and len(keys.shape) == len(values.shape) == 3 and heads <= _MOST_HEADS
        if values is None or not fits or (*keys.shape[:2], heads) != (values.shape[0], values.shape[2], keys.shape[0]):
            found = "missing" if values is None else f"{list(values.shape)}"
            raise GgufError(
                f"its tensor '{short(name)}' is {list(keys.shape)} and '{short(values_name)}' is {found}, expected "
                f"[{heads}, rank, key] and [{heads}, value, rank], and at most {_MOST_HEADS} heads"
            )
        _, rank, key = keys.shape
        whole: ModelTensor | None = None
        width = values.shape[1]
        for head in reversed(range(heads)):
            value = ModelTensor(values_name, values, head * width, width, (width, rank), below=whole)
            whole = ModelTensor(name, keys, head * rank, rank, (key, rank), below=value, is_transposed=True)
        assert whole is not None, "there are heads"
        return whole

    def _joined(self, name: str, info: TensorInfo, outer: str, kind: str | None) -> Iterator[tuple[str, ModelTensor]]:
        """Queries, keys and values, stacked by rows, with heads of equal width."""
        sizes = {**self.heads, "v": self.heads["k"]}
        width, rest = divmod(info.shape[0], sum(sizes.values()))
        if rest:
            raise GgufError(
                f"its tensor '{short(name)}' has {info.shape[0]} rows, expected a multiple of {sum(sizes.values())}"
            )
        first = 0
        for part, count in sizes.items():
            rows, num_rows = self.rows.get(f"attn_{part}"), count * width
            _check_order(name, "rows", num_rows, rows)
            shape = (num_rows, *info.shape[1:])
            yield f"{outer}.{part}_proj.{kind}", ModelTensor(name, info, first, num_rows, shape, rows)
            first += num_rows


def _of_experts(
    name: str, info: TensorInfo, outer: str, inner: str, kind: str | None
) -> Iterator[tuple[str, ModelTensor]]:
    what, num_dimensions = ("a vector", 2) if kind == "bias" else ("a matrix", 3)
    if len(info.shape) != num_dimensions or info.shape[0] > _MOST_EXPERTS:
        raise GgufError(
            f"its tensor '{short(name)}' is {list(info.shape)}, expected {what} for each of at most {_MOST_EXPERTS} "
            "experts"
        )
    num_rows = 1 if kind == "bias" else info.shape[1]
    for expert in range(info.shape[0]):
        yield f"{outer}.{expert}.{inner}.{kind}", ModelTensor(name, info, expert * num_rows, num_rows, info.shape[1:])


def _model_shape(part: str, shape: Shape) -> Shape:
    if part in _CONVOLUTIONS and len(shape) == 2:
        return shape[0], 1, shape[1]
    if part in _FLAT:
        return (math.prod(shape),)
    return (1, *shape) if part == "ffn_gate_inp_shexp" and len(shape) == 1 else shape


def _minus_one(values: Floats) -> Floats:
    return values - np.float32(1)


def _log_of_negative(values: Floats) -> Floats:
    """NaN for other numbers, with which no model passes its check."""
    with np.errstate(all="ignore"):
        return np.log(-values)


def _check_order(name: str, what: str, count: int, order: Order | None) -> None:
    if order is not None and (expected := order.why_not(count)):
        raise GgufError(f"its tensor '{short(name)}' has {count} {what}, expected {expected}")
