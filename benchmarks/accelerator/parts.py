"""The five parts of the accelerator benchmark: their sections, in order, with time limits.

Used by benchmarks/gpu.py. Independent of how sections are run. Invariants: the limits of a part's sections sum up to at
most PART_LIMIT_S, so that a hanging section takes no time from others; the most useful ones come first.
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
    is_gate: bool = False
    """Where it fails, all later sections are skipped, those of later parts too."""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.program, self.shape, self.label.replace(" ", "-"))))


LONG_CONTEXT: Final = {"max_model_len": 131072}
FEW_GRAPHS: Final = {"cudagraph_capture_sizes": (1, 8, 64, 256, 2048)}
"""Those of the steps that are measured, so that an engine starts in little time."""
EXPERTS, INT4, WINDOW = "qwen3-30b-a3b-12-layers", "llama-3.1-8b-int4", "mistral-7b-v0.1-4-layers"
_CEILINGS = Planned("ceilings", 20)
_SMOKE = (
    Planned("smoke", 60, SMALL, is_gate=True),
    Planned("smoke", 40, SMALL, "batch invariant", {"batch_invariant": True}, is_gate=True),
)
_ATTENTION = Planned("attention_parity", 110)
_EQUALITY = Planned("equality", 75, SMALL)
_FIRST = Planned("first_requests", 55, SMALL)
_EXPERT_TIMES = Planned("experts", 30, measures=("times",))


def _decode(shape: str, limit_s: float, label: str = "", is_gate: bool = False, **options: Any) -> Planned:
    return Planned("engine_runs", limit_s, shape, label, {**FEW_GRAPHS, **options}, ("decode", "prefill"), is_gate)


PARTS: Final[Mapping[int, tuple[Planned, ...]]] = {
    1: (
        _CEILINGS,
        *_SMOKE,
        _decode(LARGE, 80, is_gate=True),
        Planned("kernel_table", 110, LARGE),
        Planned("engine_runs", 45, LARGE, "workloads", {}, ("workload",)),
        Planned("product_times", 50, LARGE),
        _decode(LARGE, 75, "fp8", quantization="fp8"),
        Planned("libraries", 60, LARGE),
    ),
    2: (
        _CEILINGS,
        _ATTENTION,
        Planned("product_parity", 50),
        Planned("experts", 35, measures=("parity",)),
        Planned("sampling_steps", 40, SMALL),
        Planned("kernel_tests", 85),
        _EQUALITY,
        Planned("attention_sweep", 80, LARGE),
        Planned("sanitizer", 50),
    ),
    3: (
        _CEILINGS,
        Planned("faults", 85, SMALL),
        Planned("server_streams", 60, LARGE),
        Planned("speculation", 45, SMALL),
        _decode(INT4, 75),
        _EXPERT_TIMES,
        _decode(EXPERTS, 50),
        Planned("adapters", 50, LARGE),
        Planned("windows", 40, WINDOW),
        _FIRST,
        Planned("block_copies", 15, LARGE),
    ),
    4: (
        _CEILINGS,
        _ATTENTION,
        _FIRST,
        replace(_EQUALITY, limit_s=70),
        Planned("engine_runs", 90, LARGE),
        Planned("kernel_table", 95, LARGE),
        Planned("product_times", 45, LARGE),
        _EXPERT_TIMES,
        Planned("server_streams", 55, LARGE),
    ),
    5: (
        _CEILINGS,
        Planned("engine_runs", 40, LARGE, "context 131072", {**FEW_GRAPHS, **LONG_CONTEXT}, ("decode",)),
        Planned("transformers_runs", 40, LARGE),
        _decode(SMALL, 25),
        _decode(SMALL, 25, "graphs off", enforce_eager=True),
        _decode(SMALL, 25, "overlap off", async_scheduling=False),
        _decode(SMALL, 25, "batch invariant", batch_invariant=True),
    ),
}
"""1: does an engine start, and where does its time go? 2: is everything right? 3: faults, servers and other models. 4
measures again what 1 to 3 did: after a change, beside the results from before it. 5: what can wait."""

TRIAL_LIMIT_S = 1800.0
"""Of all sections together where there is no GPU: a busy machine is slow, and nothing is measured."""
_TRIAL_MEASURES: Final[Mapping[str, tuple[str, ...]]] = {"engine_runs": ("decode",)}
_TRIAL_OPTIONS: Final[Mapping[str, dict[str, Any]]] = {"kernel_table": {"enforce_eager": True}}
"""The profiler sees torch's operations alone."""


_TRIAL_SHAPES: Final[Mapping[str, str]] = {EXPERTS: "tiny-experts", INT4: "tiny-int4", WINDOW: "tiny-window"}


def sections(part: int, on_gpu: bool) -> list[Planned]:
    """Without a GPU: every program once on each kind of shape, in tiny sizes."""
    if on_gpu:
        return list(PARTS[part])
    tried: dict[tuple[str, str], Planned] = {}
    for planned in PARTS[part]:
        program, shape = planned.program, _TRIAL_SHAPES.get(planned.shape, TINY)
        measures = _TRIAL_MEASURES.get(program, planned.measures)
        tiny = Planned(program, TRIAL_LIMIT_S, shape, "", _TRIAL_OPTIONS.get(program, {}), measures)
        tried.setdefault((program, shape), tiny)
    return list(tried.values())
