"""Pages of a file that rows are looked up in do not pile up in the process, and read the same after they went."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from llmbackend.engine.cpu.cpu_memory import FilePages

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
