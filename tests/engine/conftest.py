"""What tests of real, tiny models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much when the machine is busy."""
    import torch  # most tests here do without

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
