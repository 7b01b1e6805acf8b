"""The server that the suites ask."""

from __future__ import annotations

from trials.clients.conftest import base_url

__all__ = ["base_url"]
