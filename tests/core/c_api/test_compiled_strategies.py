"""A batching strategy that is a shared library, for a model of any backend."""

from __future__ import annotations

from tests.core.test_batch_strategy import CONFIG, STEPPED_BACKEND, batches
from tests.helpers.compiled_backends import Libraries
from tests.helpers.core_host import Repository


def test_a_compiled_strategy_bounds_batches(repository: Repository, libraries: Libraries) -> None:
    repository.backend("stepped", STEPPED_BACKEND)
    model = repository.model("m", "stepped", CONFIG)
    (model / "batchstrategy.so").symlink_to(libraries.library("volume_strategy"))
    assert batches(repository, {"1": 1, "2": 1, "3": 1, "4": 1, "5": 2}) == ["1,2,3", "4,5"]
