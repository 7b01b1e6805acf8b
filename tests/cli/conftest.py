"""A server of OpenAI's API whose model says what it is told to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import host_of_scripts


@pytest.fixture(scope="module")
def openai_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with host_of_scripts(tmp_path_factory.mktemp("repository")) as host, serve_openai(host) as base:
        yield base
