"""Families of models: each is served as docs/models.md says, with the tokens of transformers, or refused.

The heads have the sizes of real models, because tiny ones do not fit the native layout and would prove nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from llmbackend.engine.kernels import library
from tests.helpers.families import ALL, FACTORS, FAMILIES, Family, Result, results, tried
from tools import families

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_family_is_computed_as_the_docs_say(family: Family, tmp_path: Path) -> None:
    """And gives the tokens of transformers; what `llmbackend check` says is the same."""
    assert tried(family, tmp_path) == results()[family.model_type]


@pytest.mark.parametrize("num_experts", [0, 4])
def test_granite_4_with_attention_layers_only_is_native(num_experts: int, tmp_path: Path) -> None:
    """As Granite 4.0 Micro."""
    changes = {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", **FACTORS}
    family = Family("granitemoehybrid", changes=changes | {"num_local_experts": num_experts})
    assert tried(family, tmp_path) == Result("native")


def test_the_docs_have_the_tables() -> None:
    """`python -m tools.families` writes them."""
    assert families.PAGE.read_text() == families.page()


def test_every_family_has_a_result() -> None:
    """`python -m tools.families --all` finds it."""
    assert list(results()) == list(ALL), f"those of transformers {transformers.__version__}"
