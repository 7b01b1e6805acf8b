"""Older families whose attention is written into their modules, in the options that their configs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.families import Family, Result, tried

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "changes",
    [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": True},
        {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_falcon(changes: dict[str, Any], tmp_path: Path) -> None:
    """Keys and values for some heads, for one, for all."""
    assert tried(Family("falcon", changes={"alibi": False, **changes}), tmp_path).how == "modules"


@pytest.mark.parametrize("family", [Family("falcon", changes={"alibi": True}), Family("bloom"), Family("mpt")])
def test_alibi_is_refused(family: Family, tmp_path: Path) -> None:
    found = tried(family, tmp_path)
    assert found.how == "refused" and "(ALiBi)" in found.why


def test_a_window_that_only_the_mask_has_is_refused(tmp_path: Path) -> None:
    """Phi 3.5 MoE states one as long as its context, which is none."""
    longest = {"sliding_window": 96}
    (tmp_path / "longest").mkdir()
    assert tried(Family("phimoe", changes=longest), tmp_path / "longest").how == "modules"
    found = tried(Family("phimoe", changes={"sliding_window": 8}), tmp_path)
    assert found == Result("refused", found.why) and "sliding windows are not passed" in found.why
