"""Parts of a start: each has its own time, and those within it theirs."""

from __future__ import annotations

import os
import time

import msgspec
import pytest

from llmbackend.engine import load_progress
from llmbackend.engine.load_progress import StartPart, collecting, note, part, text_of
from llmbackend.engine.messages import ModelInfo
from llmbackend.fork_server.process_resources import process_age_s, started_ticks


def test_a_part_does_not_count_the_parts_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    with collecting() as start, part("load"):
        now_s = 1.0
        with part("read"):
            now_s = 3.0
            with part("check"):
                now_s = 3.5
        with pytest.raises(KeyError), part("fail"):
            now_s = 4.0
            raise KeyError
        now_s = 7.0
    assert [(each.name, each.seconds) for each in start.parts] == [
        ("check", 0.5), ("read", 2.0), ("fail", 0.5), ("load", 4.0)
    ]  # fmt: skip
    assert text_of((*start.parts[:2], StartPart("check", 1.0))) == "check 1.50 s, read 2.00 s"


def test_what_was_done_before_comes_first() -> None:
    with collecting() as before, part("find"):
        note("found nothing")
    with collecting() as start, part("pack"):
        note("packed")
    start.begin(before)
    assert [each.name for each in start.parts] == ["find", "pack"]
    assert start.notes == ("found nothing", "packed")


def test_the_age_of_a_process_grows_with_the_clock() -> None:
    first_s, second_s = process_age_s(), process_age_s()
    assert 0 < first_s <= second_s
    assert started_ticks(os.getpid()) > 0 == started_ticks(2**31 - 1)


def test_nothing_is_collected_where_nobody_collects() -> None:
    note("unheard")
    with part("read"):
        pass
    assert load_progress._start.get() is None


def test_the_summary_names_what_there_is() -> None:
    info = ModelInfo(
        model_type="llama", vocab_size=10, max_model_len=20, eos_token_ids=(1,), block_size=32, num_blocks=4,
        dtype="bfloat16", device="cpu", load_s=1.5,
    )  # fmt: skip
    assert info.summary == "loaded in 1.50 s"
    told = msgspec.structs.replace(info, description="cpu", paths=("kernels a: b",), parts=(StartPart("read", 0.25),))
    assert told.summary == "cpu; kernels a: b; loaded in 1.50 s (read 0.25 s)"
