"""Which of Triton's categories an HTTP path belongs to, which paths are open to everybody, and which are an operator's.

For: the HTTP door. Does not know: what is behind a path. Invariant: every route of the HTTP application has a category
(a test walks them all); a path that matches nothing here is no route, and the application answers it with 404.
Source: Triton's HTTPAPIServer::Handle and the category in each of its handlers; for /v1, the endpoint mapping of
Triton's OpenAI front end.
"""

from __future__ import annotations

import re
from typing import Final

from .restrictions import Category
from .roles import OPERATORS_CATEGORIES

OPEN_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready", "/health", "/health/ready", "/ping"})
"""Probes need no key."""

_MODEL: Final = r"/v2/models/[^/]+(/versions/[^/]+)?"
_INDEX: Final = re.compile(r"/v2/repository(/[^/]+)?/index\n?")
_STOP: Final = re.compile(rf"{_MODEL}/(stop|stopInfer)\n?", re.DOTALL)
_CATEGORIES: Final = tuple(
    # A router's "$" also matches before a last newline: so must this, or a path with one would pass as unknown.
    (re.compile(rf"({pattern})\n?", re.DOTALL), category)
    for pattern, category in (
        (rf"{_MODEL}/(infer|generate|generate_stream|stop|stopInfer)", Category.INFERENCE),
        (r"/v2/health/(live|ready)|/health(/ready)?|/ping", Category.HEALTH),
        (r"/load|/metrics", Category.STATISTICS),
        (r"/v2/models/stats", Category.STATISTICS),
        (r"/v2/logging", Category.LOGGING),
        (rf"({_MODEL}|/v2)/trace/setting", Category.TRACE),
        (r"/v2/.*sharedmemory/.*", Category.SHARED_MEMORY),
        (r"/v2/repository(/.*)?", Category.MODEL_REPOSITORY),
        (rf"{_MODEL}/config", Category.MODEL_CONFIG),
        (rf"{_MODEL}/stats", Category.STATISTICS),
        (rf"{_MODEL}/ready", Category.HEALTH),
        (_MODEL, Category.METADATA),
        (r"/v2|/openapi\.json|/version", Category.METADATA),
        (r"/v1/models(/.*)?", Category.MODEL_REPOSITORY),
        (r"/v1/.*", Category.INFERENCE),
    )
)


def category_of(path: str) -> Category | None:
    return next((category for pattern, category in _CATEGORIES if pattern.fullmatch(path)), None)


def is_operators(path: str, category: Category | None) -> bool:
    """Whether only operators may enter. Of the repository, all but its index is theirs."""
    if category is Category.MODEL_REPOSITORY:
        return path.startswith("/v2/") and _INDEX.fullmatch(path) is None
    return category in OPERATORS_CATEGORIES


def is_stop(path: str) -> bool:
    return _STOP.fullmatch(path) is not None
