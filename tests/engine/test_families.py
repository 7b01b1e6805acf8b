"""Families of models: which run as one native program, and that program, modules and transformers agree.

The heads have the sizes of real models, because tiny ones do not fit the native layout and would prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.kernels import library
from llmbackend.engine.load_forecast import forecast
from tests.helpers.families import FAMILIES, HEAD_DIMS, Family, assert_transformers, engine, generated, save_model
from tools import families

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_family_is_computed_as_the_table_says(family: Family, tmp_path: Path) -> None:
    """And gives the tokens of transformers; what `llmbackend check` says is the same."""
    model = save_model(family, HEAD_DIMS[0], tmp_path)
    core = engine(tmp_path, dtype="float32")
    info = core.info
    assert (info.path, info.path_reason[: len(family.why)]) == ("native" if family.is_native else "modules", family.why)
    assert forecast(EngineConfig(model=str(tmp_path))).why_not_faster == info.path_reason
    found = generated(core)
    assert len({tuple(tokens) for tokens, _ in found}) == len(found), "the random model's output is degenerate"
    assert_transformers(model, found)


def test_the_docs_have_the_table() -> None:
    """`python -m tools.families` writes it."""
    assert families.PAGE.read_text() == families.page()
