"""One real host per test; and what is left out where NVIDIA's python backend runs the models."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.python_host import BACKENDS, ISOLATION, Host

NVIDIAS = Path(__file__).with_name("nvidias_python_backend.toml")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "repo")
    yield made
    assert made.server.stop(10.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not BACKENDS:
        return
    reasons = differences()
    for item in items:
        if reason := reasons.get(getattr(item, "originalname", item.name)):
            item.add_marker(pytest.mark.skip(reason=reason))


def differences() -> dict[str, str]:
    """Why, by the names of tests."""
    found: dict[str, str] = {}
    for difference in tomllib.loads(NVIDIAS.read_text())["difference"]:
        if not (ISOLATION and difference.get("unless_isolated")):
            found |= dict.fromkeys(difference["tests"], difference["what"])
    return found
