"""Shared by the suites: the server's address. They run in the project's environment and in the clients' own.

Invariant: nothing of llmbackend is imported unless a server has to be started here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

URL_VARIABLE = "LLMBACKEND_CLIENTS_URL"
"""The URL of a server with the models of served.py, without /v1; unset: one is started."""


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    if url := os.environ.get(URL_VARIABLE):
        yield f"{url}/v1"
        return
    from trials.clients.served import MODEL, served

    with served(names=(MODEL,)) as server:
        yield f"http://{server.http}/v1"
