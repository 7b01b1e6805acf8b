"""The four parts of the accelerator benchmark: which sections each has, in which order, and how long each may take.

For: benchmarks/gpu.py. Does not know: how sections are run. Invariants: the limits of a part's sections sum up to at
most PART_LIMIT_S, so that a section that hangs takes no other's time; the most useful come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

PART_LIMIT_S = 570.0
"""A session's command may take ten minutes."""
SMALL, LARGE = "qwen2.5-0.5b", "llama-3.1-8b"
TINY = "tiny"


@dataclass(frozen=True)
class Planned:
    """A section to run. program: its module here; the rest as in section.Section."""

    program: str
    limit_s: float
    shape: str = ""
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    measures: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.program, self.shape, self.label.replace(" ", "-"))))


LONG_CONTEXT: Final = {"max_model_len": 131072}
_CEILINGS = Planned("ceilings", 30)
_SMOKE = Planned("smoke", 75, SMALL)
_ATTENTION = Planned("attention_parity", 150)
_EQUALITY = Planned("equality", 80, SMALL)
_FIRST = Planned("first_requests", 60, SMALL)


def _ablation(label: str, **options: Any) -> Planned:
    return Planned("engine_runs", 30, SMALL, label, options, ("decode", "prefill"))


PARTS: Final[Mapping[int, tuple[Planned, ...]]] = {
    1: (
        _CEILINGS,
        _SMOKE,
        _ATTENTION,
        Planned("product_parity", 75),
        Planned("kernel_tests", 110),
        Planned("sanitizer", 130),
    ),
    2: (
        _CEILINGS,
        Planned("kernel_table", 130, LARGE),
        Planned("engine_runs", 120, LARGE),
        Planned("engine_runs", 70, LARGE, "context 131072", LONG_CONTEXT, ("decode",)),
        Planned("attention_sweep", 120, LARGE),
        Planned("transformers_runs", 90, LARGE),
    ),
    3: (
        _EQUALITY,
        _FIRST,
        Planned("faults", 100, SMALL),
        Planned("engine_runs", 70, LARGE, "", {}, ("workload",)),
        Planned("server_streams", 80, LARGE),
        _ablation(""),
        _ablation("graphs off", enforce_eager=True),
        _ablation("overlap off", async_scheduling=False),
        _ablation("fused kernels off", kernels="torch"),
        _ablation("batch invariant", batch_invariant=True),
    ),
    4: (
        _CEILINGS,
        replace(_ATTENTION, limit_s=120),
        _FIRST,
        replace(_EQUALITY, limit_s=70),
        Planned("engine_runs", 120, LARGE),
        Planned("kernel_table", 100, LARGE),
        Planned("server_streams", 60, LARGE),
    ),
}
"""4 measures again what 1 to 3 did: after a change, beside the results from before it."""

TRIAL_LIMIT_S = 1800.0
"""Of all sections together where there is no GPU: a busy machine is slow, and nothing is measured."""
_TRIAL_MEASURES: Final[Mapping[str, tuple[str, ...]]] = {"engine_runs": ("decode",)}
_TRIAL_OPTIONS: Final[Mapping[str, dict[str, Any]]] = {"kernel_table": {"enforce_eager": True}}
"""The profiler sees torch's operations alone."""


def sections(part: int, on_gpu: bool) -> list[Planned]:
    """Without a GPU: every program once, on the tiny shape."""
    if on_gpu:
        return list(PARTS[part])
    return [
        Planned(program, TRIAL_LIMIT_S, TINY, "", _TRIAL_OPTIONS.get(program, {}), _TRIAL_MEASURES.get(program, ()))
        for program in dict.fromkeys(planned.program for planned in PARTS[part])
    ]
