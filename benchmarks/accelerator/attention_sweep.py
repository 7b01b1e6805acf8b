"""How fast attention is with other tiles, warps, pipeline stages and programs than the engine's, and at longer bounds.

    python -m benchmarks.accelerator.attention_sweep --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

For choosing the launch parameters in paged_attention.py. Independent of whether results are right. Invariants: a
decode's time is related to the bytes of its keys and values, a prefill's to its operations; the engine's own parameters
are measured first and last, so that a drift of the device can be seen; launches are replayed from a graph; a
configuration that does not compile is reported as such.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from .attention_cases import Case, Step
from .section import Section, in_parallel, run_alone, seconds_in_graph
from .shapes import SHAPES

LAUNCHES = 4
"""Of a graph; as the layers of a step."""
_TILES: tuple[dict[str, int], ...] = (
    {"decode_warps": 2}, {"decode_warps": 8}, {"decode_stages": 3}, {"decode_stages": 4}, {"decode_stages": 7},
    {"decode_warps": 8, "decode_stages": 3}, {"keys": 32}, {"keys": 128, "decode_stages": 3},
)  # fmt: skip
_PREFILL_TILES: tuple[dict[str, int], ...] = (
    {"warps": 4}, {"stages": 2}, {"stages": 4}, {"rows": 64, "warps": 4}, {"rows": 64}, {"keys": 128}, {"keys": 32},
)  # fmt: skip
_UNLIMITED: Any = {"decode_registers": None}
_DECODE_PROGRAMS: tuple[dict[str, Any], ...] = (
    {"decode_programs": 1} | _UNLIMITED, {"decode_programs": 2} | _UNLIMITED, {"decode_programs": 3} | _UNLIMITED,
    {"decode_programs": 3, "decode_registers": 168}, {"decode_programs": 4, "decode_registers": 128},
    {"decode_programs": 3, "keys": 32} | _UNLIMITED,
)  # fmt: skip
"""For each multiprocessor. Without a limit of registers two fit on an H100 where there are many sequences, and with 32
keys three."""
_PREFILL_PROGRAMS = (1, 2, 4, 6, 8)


@dataclass(frozen=True)
class Trial:
    """changed: fields of Tiles; programs: of prefill, for each multiprocessor, 0 = as the engine has it."""

    case: Case
    changed: Mapping[str, Any] = field(default_factory=dict)
    programs: int = 0

    @property
    def configuration(self) -> str:
        changes = {**self.changed, **({"programs": self.programs} if self.programs else {})}
        return ", ".join(f"{name} {value}" for name, value in changes.items()) or "own"


def trials(section: Section) -> Iterator[Trial]:
    shape = SHAPES[section.shape]
    heads = shape.head_dim, shape.num_heads, shape.num_kv_heads

    def decode(batch: int, length: int, bound: int) -> Case:
        return Case(*heads, ((length, 1),) * batch, max_seq_len=bound, name=f"decode {batch} x {length} of {bound}")

    if not section.on_gpu:
        yield Trial(decode(2, 40, 64))
        yield Trial(decode(2, 40, 64), {"decode_stages": 3, "decode_programs": 1})
        yield Trial(decode(2, 40, 64), programs=1)
        return
    main = decode(64, 2048, 4096)
    many = decode(256, 304, 4096)  # as the last steps of engine_runs with 256 x 256
    others = [decode(1, 2048, 4096), many, decode(1, 2048, 131072), decode(64, 2048, 131072)]
    float8 = replace(many, float8=True, name=f"{many.name}, float8")
    one_long = Case(*heads, ((32768, 1), *((300, 1),) * 63), name="decode 1 x 32768 beside 63 x 300")
    prefill = Case(*heads, ((2048, 2048),), max_seq_len=4096, name="prefill 1 x 2048")
    for case in (main, *others, float8, one_long, prefill):
        yield Trial(case)
    for changed in _TILES:
        yield Trial(main, changed)
    for changed in _PREFILL_TILES:
        yield Trial(prefill, changed)
    for case in (main, many, float8, one_long):
        yield from (Trial(case, changed) for changed in _DECODE_PROGRAMS)
    yield from (Trial(prefill, programs=programs) for programs in _PREFILL_PROGRAMS)
    yield Trial(main)


def measure(section: Section) -> None:
    import torch

    every = list(trials(section))
    if section.on_gpu:  # into Triton's cache, so that the trials behind wait for no compiler
        for _ in in_parallel(_Once(section.device), every, True):
            pass
    for trial in every:
        section.add(measure="sweep", **_line(trial, torch.device(section.device)))


def _line(trial: Trial, device: Any) -> dict[str, Any]:
    named = {"case": trial.case.name, "configuration": trial.configuration}
    try:
        with _with_parameters(trial):
            step = Step(trial.case, device)
            call_s = seconds_in_graph([step.launch] * LAUNCHES, device)
    except Exception as failure:  # too much shared memory, say
        return {**named, "refused": f"{type(failure).__name__}: {failure}"[:200]}
    return {**named, "call_s": call_s, "kv_bytes": step.num_kv_bytes(), "flops": flops_of(trial.case)}


class _Once:
    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, trial: Trial) -> None:
        import torch

        with contextlib.suppress(Exception), _with_parameters(trial):
            Step(trial.case, torch.device(self._device)).launch()
            torch.cuda.synchronize()


@contextlib.contextmanager
def _with_parameters(trial: Trial) -> Iterator[None]:
    from llmbackend.engine.gpu.kernels import paged_attention

    choose = paged_attention.choose_tiles

    def changed(*arguments: Any) -> Any:
        return replace(choose(*arguments), **trial.changed)

    programs = {"_PREFILL_PROGRAMS": trial.programs} if trial.programs else {}
    with mock.patch.dict(vars(paged_attention), {"choose_tiles": changed, **programs}):
        yield


def flops_of(case: Case) -> float:
    """A multiply-add counts as two; of a query's keys those that it sees."""
    seen = sum(count * (length - count) + count * (count + 1) / 2 for length, count in case.parts)
    return 4.0 * seen * case.num_heads * case.head_dim


if __name__ == "__main__":
    run_alone("attention_sweep", measure)
