"""Triton's restricted APIs: groups of endpoints that open only to requests with an agreed header.

For: the doors and the command line. Does not know: which endpoint is in which group (http_paths.py, grpc_door.py).
Invariant: a category is in one group at most; values are compared in constant time.
Source: Triton's restricted_features.h and ParseRestrictedFeatureOption, with their texts.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

GRPC_HEADER_PREFIX: Final = "triton-grpc-protocol-"
_FLAG: Final = {"api": "http-restricted-api", "protocol": "grpc-restricted-protocol"}


class Category(StrEnum):
    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


@dataclass(frozen=True, slots=True)
class Restriction:
    """`header` is lower case: names of headers are compared so."""

    header: str
    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Restrictions:
    of: Mapping[Category, Restriction] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of)

    def missing_header(self, category: Category | None, headers: Mapping[str, bytes]) -> str | None:
        """The header that a request of `category` lacks or has wrong; None when it may pass."""
        restriction = None if category is None else self.of.get(category)
        if restriction is None:
            return None
        given = headers.get(restriction.header)
        passes = given is not None and hmac.compare_digest(given, restriction.value)
        return None if passes else restriction.header


NO_RESTRICTIONS: Final = Restrictions()


def parse_restrictions(items: Iterable[str], kind: Literal["api", "protocol"]) -> Restrictions:
    """`<name>,<name>:<key>=<value>` each. Raises ValueError with Triton's text."""
    of: dict[Category, Restriction] = {}
    prefix = GRPC_HEADER_PREFIX if kind == "protocol" else ""
    for item in items:
        names, key, value = _split(item, _FLAG[kind])
        for name in names.split(","):
            if name not in set(Category):
                raise ValueError(f"unknown restricted {kind} '{name}'")
            if Category(name) in of:
                raise ValueError(f"restricted {kind} '{name}' can not be specified in multiple config groups")
            of[Category(name)] = Restriction((prefix + key).lower(), value.encode())
    return Restrictions(of)


def _split(item: str, flag: str) -> tuple[str, str, str]:
    names, _, setting = item.partition(":")
    key, _, value = setting.partition("=")
    if not names or not key or not value:
        shown = item.rpartition("=")[0] or item  # what is behind "=" is a secret
        raise ValueError(f"--{flag} option format is '<config name>:<setting>=<value>'. Got {shown}")
    return names, key, value
