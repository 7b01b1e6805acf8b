"""What clients keep until the process ends."""

import gevent
import pytest


@pytest.fixture(scope="session", autouse=True)
def gevent_hub() -> None:
    """Triton's HTTP client runs on gevent, whose hub keeps its descriptors: they are not leaked by a test."""
    gevent.sleep(0)
