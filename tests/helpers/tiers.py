"""Which tests are nightly: `make test` leaves them out, `make test-all` runs them.

Used by tests/conftest.py. Invariant: decided only here, by file and parameter, according to how long tests take
(`pytest --durations=0`) and how rarely they find what others miss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from llmbackend.engine.kernels import library

TESTS: Final = Path(__file__).parents[1]

_GPU_DAILY: Final = (
    "device_rows", "device_sampler", "gpu_memory", "gpu_program", "gpu_runner", "paged_attention", "table_mirror",
    "window_blocks",
)  # fmt: skip
"""Of tests/engine/gpu, where kernels run in Triton's interpreter."""
_NIGHTLY: Final = (
    "cluster/test_host_away.py",
    "cluster/test_one_machine.py",
    "cluster/test_split_over_machines.py",
    "cluster/test_two_machines.py",
    "cluster/test_whole_answers.py",
    "engine/test_family_variants.py",
    "gguf/test_many_mutations.py",
    "pages/test_chat_page.py",
    "pages/test_engine_page.py",
    "pages/test_hostile_text.py",
    "pages/test_operations_page.py",
    "trials/agents",
    "trials/clients",
    "trials/test_quick_schemas.py",
    "trials/test_quick_stall.py",
)
_NIGHTLY_VARIANTS: Final = tuple(name for name in library.available()[1:] if name != "generic")
"""Instruction sets, without the best one of this machine and the one that every machine has."""


def is_nightly_file(path: Path) -> bool:
    """path: absolute, of a file or folder of tests."""
    place = path.relative_to(TESTS).as_posix()
    if place.startswith("engine/gpu/test_"):
        return path.stem.removeprefix("test_") not in _GPU_DAILY
    return any(place == nightly or place.startswith(f"{nightly}/") for nightly in _NIGHTLY)


def is_nightly(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    variant = callspec.params.get("variant") if callspec is not None else None
    return variant in _NIGHTLY_VARIANTS or is_nightly_file(item.path)
