"""How fast this machine reads memory: a buffer far larger than its caches, read in order by all threads at once.

    python -m benchmarks.bandwidth

For the fraction of it reached by a single stream of tokens, which reads all weights for each token. Independent of
engines. Invariant: the best of several rounds counts, because other users of the machine can only slow it down. A
comparison showed that numpy's reductions read as fast as a loop of vector loads with prefetching.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BUFFER_BYTES = 1 << 30
ROUNDS = 12


def read_gb_per_s(buffer_bytes: int = BUFFER_BYTES, rounds: int = ROUNDS) -> float:
    threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(buffer_bytes, np.int8), threads)
    with ThreadPoolExecutor(threads) as pool:
        return max(buffer_bytes / _seconds(pool, parts) for _ in range(rounds)) / 1e9


def _seconds(pool: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    start_s = time.perf_counter()
    list(pool.map(np.max, parts))
    return time.perf_counter() - start_s


if __name__ == "__main__":
    print(f"{read_gb_per_s():.1f} GB/s")
