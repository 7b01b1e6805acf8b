"""Parts of a start: each has its own time, and those within it theirs."""

from __future__ import annotations

import time

import msgspec
import pytest

from llmbackend.engine import start_parts
from llmbackend.engine.infer_request import ModelInfo
from llmbackend.engine.start_parts import StartPart, collecting, part, text_of


def test_a_part_does_not_count_the_parts_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    with collecting() as parts, part("load"):
        now_s = 1.0
        with part("read"):
            now_s = 3.0
            with part("check"):
                now_s = 3.5
        with pytest.raises(KeyError), part("fail"):
            now_s = 4.0
            raise KeyError
        now_s = 7.0
    assert parts == [StartPart("check", 0.5), StartPart("read", 2.0), StartPart("fail", 0.5), StartPart("load", 4.0)]
    assert text_of(parts[:2]) == "check 0.50 s, read 2.00 s"


def test_nothing_is_collected_where_nobody_collects() -> None:
    with part("read"):
        pass
    assert start_parts._collector.get() is None


def test_the_summary_names_what_there_is() -> None:
    info = ModelInfo(
        model_type="llama", vocab_size=10, max_model_len=20, eos_token_ids=(1,), block_size=32, num_blocks=4,
        dtype="bfloat16", device="cpu", load_s=1.5,
    )  # fmt: skip
    assert info.summary == "loaded in 1.50 s"
    told = msgspec.structs.replace(info, description="cpu", paths=("kernels a: b",), parts=(StartPart("read", 0.25),))
    assert told.summary == "cpu; kernels a: b; loaded in 1.50 s (read 0.25 s)"
