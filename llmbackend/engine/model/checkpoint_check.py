"""Checks, before allocating memory, that a checkpoint's tensors match the model described by its config.

Used by the loader; independent of model families and packing. transformers itself loads the checkpoint's names, types
and shapes as tensors without memory, with all its rules for renamed, tied, merged and quantised weights, and reports
what is left over. The steps are those of its `from_pretrained`, which accepts a `device_map` only if the package
accelerate is installed. Invariant: a checkpoint that passes provides every weight of the model; transformers would fill
missing ones with random numbers.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import get_hf_quantizer
from transformers.utils.generic import ContextManagers

from ..errors import CheckpointError
from .checkpoint_files import TensorHeader, check_inner_widths, few

logger = logging.getLogger(__name__)

_TORCH_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip

_HARMLESS = re.compile(
    r"rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)(attn|attention)\.(bias|masked_bias)$"  # causal masks that GPT-2 and GPT-NeoX used to save
    r"|(^|\.)position_ids$|_extra_state$"
    r"|(^|\.)mtp(_\w+)?\."  # layers for drafting further tokens
    r"|^v_head\."  # a value head from training
    r"|\.(input|activation|k|v|kv)_scale$"  # for activations; of cached keys and values, see note_unused_scales
)
"""Tensors that a checkpoint may contain although the model does not use them."""
_OTHER_MODALITY = re.compile(r"(^|\.)(vision|visual|vit|audio|speech|image|multi_?modal|mm)(_\w+)?\.")
"""Parts of a multimodal model that text does not use."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFTING_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_SCALES = ("_scale_inv", "_scale")
_KV_SCALE = re.compile(r"\.(k|v|kv)_scale$")
PLAIN_UNDER_A_LABEL = "config.json states a quantization_config, but the weights are plain: using them as they are"


def check_tensors(
    model_class: Any,
    hf_config: Any,
    tensors: Mapping[str, TensorHeader],
    multimodal: bool = False,
    spare: Collection[str] = (),
) -> None:
    """Raises CheckpointError naming what is missing, left over or of another shape.

    model_class: a transformers class; hf_config: its config. multimodal: whether the checkpoint may contain, or lack,
    parts for images and sound. spare: names that may be left over. Takes a tenth of a second, and no memory for
    weights.
    """
    _check_scales(hf_config, tensors)
    state = {name: _without_memory(tensor, name) for name, tensor in tensors.items()}
    try:
        with without_report():
            info = _loading_info(model_class, hf_config, state, tensors)
    except CheckpointError:
        raise
    except ImportError as error:  # from a package that reads this kind of quantised weights
        raise CheckpointError(f"its weights cannot be read: {error}") from error
    except Exception as error:
        if gaps := _gaps(tensors):
            raise CheckpointError(f"it does not fit its config.json: missing {few(gaps)}") from None
        # The conversion needs real tensors; errors will show when the weights are read.
        logger.info("the checkpoint's tensors were not compared with the model: %r", error)
        return
    check_loading_info(info, hf_config, multimodal, spare)


def _loading_info(
    model_class: Any, hf_config: Any, state: dict[str, torch.Tensor], tensors: Mapping[str, TensorHeader]
) -> Mapping[str, Collection[Any]]:
    """What `from_pretrained` would report with output_loading_info; everything stays on the meta device."""
    quantizer, config, _ = get_hf_quantizer(copy.deepcopy(hf_config), None, None, True, {})
    dtype = getattr(config, "dtype", None) or torch.float32
    with ContextManagers(model_class.get_init_context(dtype, quantizer is not None, False, None)):
        model = model_class(config)
        check_inner_widths(config.to_dict(), tensors, {size for each in model.parameters() for size in each.shape})
        if quantizer is not None:
            quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, checkpoint_files=None)
    load_config = LoadStateDictConfig(
        ignore_mismatched_sizes=True,
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),
    )
    info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=state, load_config=load_config)
    found: Mapping[str, Collection[Any]] = model_class._finalize_model_loading(model, load_config, info).to_dict()
    return found


def check_loading_info(
    info: Mapping[str, Collection[Any]], hf_config: Any, multimodal: bool, spare: Collection[str] = ()
) -> None:
    """info: as returned by from_pretrained with output_loading_info. The others: as in `check_tensors`. Raises
    CheckpointError."""
    drafting = _drafting_layers(hf_config.get_text_config(decoder=True))

    def is_needed(name: str) -> bool:
        return not (multimodal and _OTHER_MODALITY.search(name))

    missing = sorted(filter(is_needed, info["missing_keys"]), key=_natural)
    unexpected = [name for name in sorted(info["unexpected_keys"], key=_natural) if not _HARMLESS.search(name)]
    unexpected = [name for name in unexpected if is_needed(name) and name not in spare]
    unexpected = [name for name in unexpected if not ((layer := _LAYER.search(name)) and int(layer[1]) in drafting)]
    misshaped = [
        f"{name} is {list(found)} and not {list(expected)}"
        for name, found, expected in sorted(info["mismatched_keys"], key=lambda each: _natural(each[0]))
    ]
    parts = {"missing": missing, "of another shape": misshaped, "unexpected": unexpected}
    if text := "; ".join(f"{what}: {few(names)}" for what, names in parts.items() if names):
        raise CheckpointError(f"its tensors do not fit its config.json: {text}")


def _drafting_layers(text_config: Any) -> range:
    """Numbers of the layers after those of the model, which draft further tokens (DeepSeek V3, GLM-4.5)."""
    first = int(getattr(text_config, "num_hidden_layers", None) or 0)
    count = max(int(getattr(text_config, name, None) or 0) for name in _DRAFTING_LAYERS)
    return range(first, first + count)


def _check_scales(hf_config: Any, tensors: Mapping[str, TensorHeader]) -> None:
    """Raises CheckpointError for 8-bit floats without scales, which transformers would accept as they are."""
    eight_bits = [name for name, tensor in tensors.items() if tensor.dtype.startswith("F8_E") and "scale" not in name]
    if eight_bits and getattr(hf_config, "quantization_config", None) is None:
        raise CheckpointError(
            f"its config.json states no quantization_config, expected one for weights in 8 bits: {few(eight_bits)}"
        )
    unscaled = [name for name in eight_bits if not any(f"{name}{scale}" in tensors for scale in _SCALES)]
    if unscaled:
        raise CheckpointError(f"its tensors do not fit its config.json: missing: the scales of {few(unscaled)}")


def note_plain_weights(hf_config: Any, tensors: Mapping[str, TensorHeader]) -> None:
    """Warns of a quantization_config in a checkpoint with plain weights, which is accepted."""
    is_packed = any(tensor.dtype.startswith("F8_E") or tensor.dtype == "U8" for tensor in tensors.values())
    if getattr(hf_config, "quantization_config", None) is not None and not is_packed:
        logger.warning(PLAIN_UNDER_A_LABEL)


def note_unused_scales(kv_cache_dtype: str, names: Iterable[str]) -> None:
    """Warns of tensors with scales for cached keys and values, if those are in 8 bits."""
    found = sorted(filter(_KV_SCALE.search, names), key=_natural)
    if found and kv_cache_dtype != "auto":
        logger.warning(
            "kv_cache_dtype is '%s': scales of keys and values are 1, those of the checkpoint are not used: %s",
            *(kv_cache_dtype, few(found)),
        )


def _without_memory(tensor: TensorHeader, name: str) -> torch.Tensor:
    dtype = _TORCH_TYPES.get(tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"its tensor {few([name])} is of type {tensor.dtype}, which torch does not have")
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _gaps(names: Iterable[str]) -> list[str]:
    """Tensors that a module lacks but most others in the same list have, such as one expert's weight."""
    parts: dict[str, dict[str, set[str]]] = {}
    for name in names:
        if match := re.match(r"(.*\.)(\d+)(\..*)$", name):
            stem, index, rest = match.groups()
            kind = re.sub(r"\.\d+(?=\.)", ".*", stem)
            parts.setdefault(kind, {}).setdefault(f"{stem}{index}", set()).add(rest)
    found = []
    for modules in parts.values():
        every: set[str] = set().union(*modules.values())
        usual = {rest for rest in every if sum(rest in has for has in modules.values()) * 2 > len(modules)}
        found += [f"{module}{rest}" for module, has in modules.items() for rest in usual - has]
    return sorted(found, key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@contextmanager
def without_report() -> Iterator[None]:
    """Silences transformers' table, which this module replaces by one line. The logger's level is left unchanged,
    because it decides what else transformers checks and warns about."""
    reporter = logging.getLogger("transformers.modeling_utils")
    was_disabled, reporter.disabled = reporter.disabled, True
    try:
        yield
    finally:
        reporter.disabled = was_disabled
