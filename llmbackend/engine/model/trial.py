"""Is a description right? Asked of a small model of the same config, where the real one is never in one place.

For: the ranks of a split model. Does not know: ranks, files. A description is read off modules that the config alone
decides, so a model of the same widths with few layers, a small vocabulary and random weights is described as the real
one is. Invariants: every kind of layer that the config names is in it; its logits are known, so that a program made of
its description can be compared with its modules.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch

from ..config import EngineConfig
from ..errors import ProgramUnsupportedError
from ..gpu.weights.dense import join_neighbours
from .compatibility import check_model
from .decoder_description import Attention, Decoder
from .loader import LoadedModel, describe_or_why, open_checkpoint, random_model
from .rotary import fix_frequencies

MIN_LAYERS = 2
VOCAB_SIZE = 128
_ROUNDING = 1e-2
"""Of a factor that is measured in the model's type."""


def trial_of(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> LoadedModel:
    """A small model of the checkpoint's kind on the device, checked and described. loaded: the real one, not split.

    Raises ValueError for a model that is not supported, ProgramUnsupportedError when the small model's description says
    something else than the real one's.
    """
    assert loaded.decoder is not None
    hf_config = _small(open_checkpoint(config, dense=True).hf_config)
    model = random_model(config, hf_config, loaded.dtype, device).eval()
    fix_frequencies(model, loaded.max_model_len)
    _spread(model, config.seed)
    join_neighbours(model)
    checked = check_model(model)
    decoder, why_modules = describe_or_why(model, checked.options, loaded.max_model_len, with_experts=True)
    if decoder is None:
        raise ProgramUnsupportedError(why_modules)
    _compare(decoder, loaded.decoder)
    return replace(
        loaded,
        model=model,
        layer_shapes=checked.shapes,
        device=device,
        vocab_size=VOCAB_SIZE,
        checked=checked,
        decoder=decoder,
    )


def _small(hf_config: Any) -> Any:
    hf_config = copy.deepcopy(hf_config)
    text_config = hf_config.get_text_config(decoder=True)
    kinds = list(getattr(text_config, "layer_types", None) or ())
    last_new = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    text_config.num_hidden_layers = min(max(last_new, MIN_LAYERS), int(text_config.num_hidden_layers))
    if kinds:
        text_config.layer_types = kinds[: text_config.num_hidden_layers]
    text_config.vocab_size = min(VOCAB_SIZE, int(text_config.vocab_size))
    text_config.pad_token_id = text_config.bos_token_id = text_config.eos_token_id = None
    return hf_config


@torch.no_grad()
def _spread(model: torch.nn.Module, seed: int) -> None:
    """Random numbers of a size at which every part of a layer shows in the logits."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        numbers = torch.randn(parameter.shape, generator=draw)
        if parameter.dim() == 1:
            parameter.add_((0.3 * numbers).to(parameter))
        else:
            parameter.copy_(numbers / parameter.shape[-1] ** 0.5)


def _compare(small: Decoder, real: Decoder) -> None:
    """What is not read from the files, and would be wrong if a module without memory was completed wrongly."""
    pairs = zip(small.layers, real.layers, strict=False)
    factors = math.isclose(small.embedding_factor, real.embedding_factor, rel_tol=_ROUNDING)
    if not factors or not all(_same_rotation(a.attention, b.attention) for a, b in pairs):
        raise ProgramUnsupportedError("its description without weights is not that of its modules")


def _same_rotation(small: Attention, real: Attention) -> bool:
    if small.cos_sin is None or real.cos_sin is None:
        return small.cos_sin is real.cos_sin
    return torch.equal(small.cos_sin.cpu(), real.cos_sin)
