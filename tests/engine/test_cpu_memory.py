"""What a model takes of a CPU's memory: its size is told, and pages of a file that rows are looked up in do not pile up
in the process, and read the same after they went."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import numpy as np
import pytest

from llmbackend.demo import DEMO_MODEL
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_memory import FilePages
from llmbackend.engine.make_runner import make_runner

ROW_BYTES = 4096
NUM_ROWS = 19_200


def resident_bytes(memory: mmap.mmap) -> int:
    """Of this mapping alone, in this process."""
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{begin:x}-"):
            return next(int(text.split()[1]) << 10 for text in lines if text.startswith("Rss:"))
    raise AssertionError("the mapping is gone")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_rows_of_a_file_do_not_pile_up(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).permutation(NUM_ROWS)
    with (tmp_path / "table").open("w+b") as file:
        for row in range(NUM_ROWS):
            file.write(row.to_bytes(8, "little") * (ROW_BYTES // 8))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    table = np.frombuffer(mapped, np.int64).reshape(NUM_ROWS, -1)
    pages, most = FilePages(np.frombuffer(mapped, np.uint8)), 0
    for i, batch in enumerate(np.split(rows, 300)):
        assert (table[batch, 7] == batch).all()
        pages.read(len(batch))
        if i % 10 == 0:
            most = max(most, resident_bytes(mapped))
    assert 0 < most <= FilePages.LIMIT_BYTES + (32 << 20) < NUM_ROWS * ROW_BYTES


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("eager", [False, True], ids=["native", "modules"])
def test_a_model_tells_what_its_weights_and_kv_blocks_take(eager: bool) -> None:
    """The demo model in float32: 4.7 million parameters."""
    config = EngineConfig(
        model=str(DEMO_MODEL), dtype="float32", num_kv_blocks=64, enforce_eager=eager, transport="inline"
    )
    runner = make_runner(config)
    info = runner.info
    runner.close()
    assert 0.9 < info.held_weight_bytes / (4 * 4.7e6) < 1.6
    settings = json.loads((DEMO_MODEL / "config.json").read_text())
    per_token = 2 * 4 * settings["num_hidden_layers"] * settings["num_key_value_heads"] * settings["head_dim"]
    assert info.kv_bytes == 64 * info.block_size * per_token
