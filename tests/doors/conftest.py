"""Helpers that these tests share with the end-to-end ones, and what clients keep for the life of the process."""

import sys
from pathlib import Path

import gevent
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))


@pytest.fixture(scope="session", autouse=True)
def gevent_hub() -> None:
    """Triton's HTTP client runs on gevent, whose hub keeps its descriptors: they are no test's."""
    gevent.sleep(0)
