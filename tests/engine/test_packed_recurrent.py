"""Recurrent layers as data: what is written is what is read, and what does not fit is refused before kernels see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.packed_decoder import PackedDecoder, PackedModel
from llmbackend.engine.cpu.packed_recurrent import PackedScan, PackedShortConv
from llmbackend.engine.kernels import library
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.packing import pack_model
from tests.helpers.recurrent_models import RECURRENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]
change = msgspec.structs.replace


def packed(family: str, path: Path) -> PackedModel:
    RECURRENT[family].save_pretrained(path)
    config = EngineConfig(model=str(path), load_format="dummy", transport="inline", num_threads=1, num_kv_blocks=8)
    return pack_model(config, load_model(config))


def with_mixer(decoder: PackedDecoder, **fields: Any) -> PackedDecoder:
    index, layer = next((i, each) for i, each in enumerate(decoder.layers) if each.mixer is not None)
    assert layer.mixer is not None
    changed = change(layer, mixer=change(layer.mixer, **fields))
    return change(decoder, layers=(*decoder.layers[:index], changed, *decoder.layers[index + 1 :]))


@pytest.mark.parametrize("family", RECURRENT)
def test_a_description_is_read_as_it_was_written(family: str, tmp_path: Path) -> None:
    model = packed(family, tmp_path)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(model.decoder), type=PackedDecoder) == model.decoder
    model.decoder.check(model.memories)


def test_broken_convolutions_are_refused(tmp_path: Path) -> None:
    model = packed("lfm2", tmp_path)
    mixer = next(layer.mixer for layer in model.decoder.layers if layer.mixer is not None)
    assert isinstance(mixer, PackedShortConv) and mixer.bias is not None
    for fields in (
        {"project": mixer.out},
        {"out": mixer.project},
        {"taps": change(mixer.taps, shape=mixer.taps.shape[::-1])},
        {"taps": change(mixer.taps, shape=(0, mixer.taps.shape[1]))},
        {"taps": change(mixer.taps, offset_bytes=1 << 40)},
        {"bias": change(mixer.bias, shape=(3,))},
    ):
        with pytest.raises(ValueError, match="the description of a packed model is broken"):
            with_mixer(model.decoder, **fields).check(model.memories)


def test_broken_recurrences_are_refused(tmp_path: Path) -> None:
    model = packed("qwen3_5", tmp_path)
    mixer = next(layer.mixer for layer in model.decoder.layers if layer.mixer is not None)
    assert isinstance(mixer, PackedScan)
    for fields in (
        {"projects": mixer.projects[:-1]},
        {"num_heads": mixer.num_heads + 1},
        {"num_key_heads": 0},
        {"num_key_heads": 3},
        {"value_dim": 8},
        {"key_dim": 4 * mixer.key_dim},
        {"columns": change(mixer.columns, v=mixer.projected)},
        {"columns": change(mixer.columns, a=-1)},
        {"decay": change(mixer.decay, shape=(1,))},
        {"norm_groups": 7},
        {"factors": mixer.decay},
        {"by_key_head": True, "projects": mixer.projects[:2]},
        {"taps": change(mixer.taps, shape=(4, 32))},
    ):
        with pytest.raises(ValueError, match="the description of a packed model is broken"):
            with_mixer(model.decoder, **fields).check(model.memories)
    attention = model.decoder.attentions[0]
    plain = [tuple(change(each, parts=()) for each in projects) for projects in (attention.qkv, (attention.out,))]
    both = change(model.decoder.layers[0], attention=change(attention, qkv=plain[0], out=plain[1][0]))
    change(model.decoder, layers=(both, *model.decoder.layers[1:])).check(model.memories)
    both = change(both, attention_norm=None)
    with pytest.raises(ValueError, match="does not fit the rest"):
        change(model.decoder, layers=(both, *model.decoder.layers[1:])).check(model.memories)
