"""Compares attention with the engines' tiles with float32, in the shapes of real models.

    python -m benchmarks.accelerator.attention_parity --device cuda --json FILE --scratch FOLDER

Shows that the compiled kernels are correct; the tests in the interpreter use small tiles. Independent of speed.
Invariants: a case is wrong when its output is far from float32's, not finite, not reproducible (a race), or when a
decoded row alone is not bit-identical to the same row in a batch; every case is in the results before anything fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .attention_cases import Case, Step
from .section import Section, in_parallel, run_alone

MAX_ERROR, MAX_ROW_ERROR = 1e-2, 4e-2
"""Relative, of all numbers together and of one head of one token: bfloat16 rounds to 2^-9."""
REPEATS = 3
DECODE = tuple((length, 1) for length in (1, 31, 255, 256, 257, 1000, 4096, 32768))
PREFILL = ((512, 512), (33, 33), (32768, 512))
MIXED = ((4096, 1), (700, 700), (32768, 1), (9000, 129), (17, 1))
HEADS = {4: (32, 8), 7: (28, 4), 8: (64, 8)}
"""Heads and KV heads, by the size of a group."""
SANITIZED = "sanitized"


def cases(on_gpu: bool) -> Iterator[Case]:
    if not on_gpu:
        yield Case(64, 7, 1, ((300, 1), (70, 5)), window=100, max_seq_len=320, name="small")
        return
    for head_dim in (64, 128, 256):
        for group, (heads, kv_heads) in HEADS.items():
            for window, float8 in ((0, False), (4096, False), (0, True)):
                for kind, parts in (("decode", DECODE), ("prefill", PREFILL), ("mixed", MIXED)):
                    name = f"{kind}, heads of {head_dim}, groups of {group}"
                    name += f", window {window}" if window else ", float8 cache" if float8 else ""
                    yield Case(head_dim, heads, kv_heads, parts, window=window, float8=float8, name=name)
    yield Case(256, 16, 8, MIXED, window=4096, softcap=50.0, float8=True, name="mixed, Gemma 2, float8 cache")
    yield Case(64, 64, 8, MIXED, window=128, sinks=True, name="mixed, gpt-oss: sinks, window 128")
    yield Case(128, 32, 8, MIXED, exact_chunks=True, name="mixed, exact chunks")


def measure(section: Section) -> None:
    if section.label == SANITIZED:
        _launch_once(section)
        return
    checked = []
    groups = [list(group) for group in _by_kernels(list(cases(section.on_gpu)))]
    for lines in in_parallel(_Checks(section.device), groups, section.on_gpu):
        for line in lines:
            section.add(measure="attention", **line)
            checked.append(line)
    section.fail([f"{line['case']}: {line['wrong']}" for line in checked if line["wrong"]])


def _by_kernels(every: list[Case]) -> Iterator[list[Case]]:
    """Cases of the same kernels together, so that one process compiles them once."""
    keys = [replace(case, parts=(), name="") for case in every]
    for key in dict.fromkeys(keys):
        yield [case for case, other in zip(every, keys, strict=True) if other == key]


class _Checks:
    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, group: list[Case]) -> list[dict[str, Any]]:
        return [check(case, self._device) for case in group]


def check(case: Case, device: str) -> dict[str, Any]:
    """A line of results; `wrong` says what is, or nothing."""
    import torch

    start_s = time.perf_counter()
    try:
        step = Step(case, torch.device(device))
        found = step.attended()
        error, row_error = _errors(found, step.expected(), case.num_heads)
        wrong = "" if error <= MAX_ERROR and row_error <= MAX_ROW_ERROR else "far from float32"
        if not all(torch.equal(step.attended(), found) for _ in range(REPEATS if device != "cpu" else 1)):
            wrong = "not the same again"
        wrong = wrong or _alone(case, step, found)
    except Exception as failure:  # of a kernel that does not compile or does not run
        return {"case": case.name, "wrong": f"{type(failure).__name__}: {failure}"[:400]}
    seconds = time.perf_counter() - start_s
    return {"case": case.name, "error": error, "row_error": row_error, "check_s": seconds, "wrong": wrong}


def _errors(found: Any, expected: Any, num_heads: int) -> tuple[float, float]:
    """NaN where anything is not finite."""
    difference = (found.float() - expected).view(len(found), num_heads, -1)
    norms = difference.norm(dim=-1) / expected.view(len(found), num_heads, -1).norm(dim=-1)
    return float(difference.norm() / expected.norm()), float(norms.max())


def _alone(case: Case, step: Step, found: Any) -> str:
    """Whether decoded rows are the same bits in a step of their own."""
    import torch

    first = 0
    for row, part in enumerate(case.parts):
        if part[1] == 1:
            alone = Step(replace(case, parts=(part,)), step.device)
            alone.qkv, alone.table, alone.cache = step.qkv[first : first + 1], step.table[row : row + 1], step.cache
            if not torch.equal(alone.attended(), found[first : first + 1]):
                return f"row {row} of {part[0]} keys is not the same alone"
        first += part[1]
    return ""


def _launch_once(section: Section) -> None:
    """For a checker of memory and races, which slows launches down a hundred times: nothing is compared, since the
    libraries that a comparison calls would take most of the time."""
    import torch

    case = Case(128, 8, 2, ((700, 1), (300, 40), (33, 1)), max_seq_len=1024, name=SANITIZED)
    found = Step(case, torch.device(section.device)).attended()
    wrong = "" if bool(found.isfinite().all()) else "not finite"
    section.add(measure="sanitized", case=case.name, wrong=wrong)
    section.fail([wrong] if wrong else [])


if __name__ == "__main__":
    run_alone("attention_parity", measure)
