"""Families that run natively, in every type of weights and with longer heads; a sample of those that are not tried
daily. Nightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbackend.engine.kernels import library
from tests.helpers.families import (
    HEAD_DIMS,
    NATIVE,
    OTHERS,
    Family,
    assert_transformers,
    engine,
    generated,
    results,
    save_model,
    tried,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]


@pytest.mark.parametrize("family", NATIVE, ids=lambda family: family.model_type)
def test_the_program_is_verified_in_every_type(family: Family, tmp_path: Path) -> None:
    """A program whose logits are not the modules' would run as modules."""
    save_model(family, HEAD_DIMS[0], tmp_path)
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4", "dtype": "bfloat16"}):
        core = engine(tmp_path, **options)
        assert (core.info.path, core.info.path_reason) == ("native", ""), options
        core.close()


@pytest.mark.parametrize("family", NATIVE, ids=lambda family: family.model_type)
def test_program_and_modules_agree_with_longer_heads(family: Family, tmp_path: Path) -> None:
    model = save_model(family, HEAD_DIMS[1], tmp_path)
    native, modules = engine(tmp_path, dtype="float32"), engine(tmp_path, dtype="float32", enforce_eager=True)
    assert (native.info.path, modules.info.path) == ("native", "modules")
    assert modules.info.path_reason == "enforce_eager is set"
    found, of_modules = generated(native), generated(modules)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in of_modules]
    assert_transformers(model, found)


@pytest.mark.parametrize("family", OTHERS[::4], ids=lambda family: family.model_type)
def test_other_families_are_as_the_docs_say(family: Family, tmp_path: Path) -> None:
    assert tried(family, tmp_path) == results()[family.model_type]
