"""Triton's categories of endpoints, and what each requires: headers of restricted APIs, roles of keys.

Invariants: every route of the HTTP application has a category (a test checks all); a category is in at most one
restricted group. Sources: Triton's restricted_features.h and ParseRestrictedFeatureOption, with their texts;
HTTPAPIServer::Handle; for /v1, the endpoint mapping of Triton's OpenAI frontend.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal


class Category(StrEnum):
    """The categories of endpoints, named as in Triton's flags."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


class Role(StrEnum):
    """The role of an API key: operators may also load models and change settings."""

    USER = "user"
    OPERATOR = "operator"


GRPC_HEADER_PREFIX: Final = "triton-grpc-protocol-"
_FLAG: Final = {"api": "http-restricted-api", "protocol": "grpc-restricted-protocol"}

OPERATOR_CATEGORIES: Final = frozenset({Category.TRACE, Category.LOGGING, Category.SHARED_MEMORY})
"""Only operators may call these, and load or unload models."""
OPEN_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready", "/health", "/health/ready", "/ping"})
"""Probes, which need no API key."""

_MODEL: Final = r"/v2/models/[^/]+(/versions/[^/]+)?"
_INDEX: Final = re.compile(r"/v2/repository(/[^/]+)?/index\n?")
_NO_INFERENCE: Final = re.compile(
    rf"({_MODEL}/(stop|stopInfer)|/v2/engine/.+|/v1/responses/resp_.+|/v1/chat/completions/chatcmpl-.+)\n?", re.DOTALL
)
_RESUMED: Final = re.compile(rf"{_MODEL}/generate_stream|/v1/(chat/)?completions|/invocations")
_CATEGORIES: Final = tuple(
    # A router's "$" also matches before a final newline; such a path needs a category, too.
    (re.compile(rf"({pattern})\n?", re.DOTALL), category)
    for pattern, category in (
        (rf"{_MODEL}/(infer|generate|generate_stream|stop|stopInfer)", Category.INFERENCE),
        (r"/v2/health/(live|ready)|/health(/ready)?|/ping", Category.HEALTH),
        (r"/load|/metrics", Category.STATISTICS),
        (r"/v2/models/stats|/v2/engine/events", Category.STATISTICS),
        (r"/v2/logging|/v2/engine/(settings|access)", Category.LOGGING),
        (r"/v2/engine/requests/[^/]+/cancel", Category.INFERENCE),
        (r"/v2/engine/instances/.*", Category.MODEL_REPOSITORY),
        (rf"({_MODEL}|/v2)/trace/setting", Category.TRACE),
        (r"/v2/.*sharedmemory/.*", Category.SHARED_MEMORY),
        (r"/v2/repository(/.*)?", Category.MODEL_REPOSITORY),
        (rf"{_MODEL}/config", Category.MODEL_CONFIG),
        (rf"{_MODEL}/stats", Category.STATISTICS),
        (rf"{_MODEL}/ready", Category.HEALTH),
        (_MODEL, Category.METADATA),
        (r"/|/v2|/openapi\.json|/docs|/version", Category.METADATA),
        (r"/v1/models(/.*)?|/v1/(un)?load_lora_adapter", Category.MODEL_REPOSITORY),
        (r"/v1(/.*)?|/(de)?tokenize|/tokenizer_info|/generative_scoring|/invocations", Category.INFERENCE),
    )
)

_SERVICE: Final = "/inference.GRPCInferenceService/"
_RPCS: Final = {
    Category.HEALTH: ("ServerLive", "ServerReady", "ModelReady"),
    Category.METADATA: ("ServerMetadata", "ModelMetadata"),
    Category.INFERENCE: ("ModelInfer", "ModelStreamInfer"),
    Category.SHARED_MEMORY: tuple(
        f"{kind}SharedMemory{action}" for kind in ("System", "Cuda") for action in ("Status", "Register", "Unregister")
    ),
    Category.MODEL_CONFIG: ("ModelConfig",),
    Category.MODEL_REPOSITORY: ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    Category.STATISTICS: ("ModelStatistics",),
    Category.TRACE: ("TraceSetting",),
    Category.LOGGING: ("LogSettings",),
}
_HEALTH_SERVICE: Final = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
CATEGORY_OF_RPC: Final = {
    f"{_SERVICE}{rpc}": category for category, rpcs in _RPCS.items() for rpc in rpcs
} | dict.fromkeys(_HEALTH_SERVICE, Category.HEALTH)
OPEN_RPCS: Final = frozenset({f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady", *_HEALTH_SERVICE})
OPERATOR_RPCS: Final = frozenset(
    f"{_SERVICE}{rpc}"
    for rpc in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        *(name for category in OPERATOR_CATEGORIES for name in _RPCS[category]),
    )
)


def category_of(path: str) -> Category | None:
    """The category of an HTTP path; None: no route matches (404)."""
    return next((category for pattern, category in _CATEGORIES if pattern.fullmatch(path)), None)


def needs_operator(path: str, category: Category | None) -> bool:
    if category is Category.MODEL_REPOSITORY:
        return not path.startswith("/v1/models") and _INDEX.fullmatch(path) is None
    return category in OPERATOR_CATEGORIES


def begins_no_inference(path: str, last_event_id: bytes = b"") -> bool:
    """Whether a request to this HTTP path of Category.INFERENCE only stops an inference, reads a stored answer or
    resumes a stream. last_event_id: its header"""
    resumes = last_event_id.decode("latin-1").strip() and _RESUMED.fullmatch(path)
    return bool(resumes or _NO_INFERENCE.fullmatch(path))


def role_needed(name: str, role: Role) -> str:
    """The refusal for the key `name` with `role`."""
    return f"This requires an API key with the role '{Role.OPERATOR}'; the key '{name}' has the role '{role}'"


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that requests of a restricted category must have."""

    header: str
    """The header's name in lower case."""
    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Restrictions:
    """The restricted categories of one port."""

    of: Mapping[Category, Restriction] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of)

    def missing_header(self, category: Category | None, headers: Mapping[str, bytes]) -> str | None:
        """The header that a request of `category` lacks or has wrong (compared in constant time); None: it may pass."""
        restriction = None if category is None else self.of.get(category)
        if restriction is None:
            return None
        given = headers.get(restriction.header)
        passes = given is not None and hmac.compare_digest(given, restriction.value)
        return None if passes else restriction.header


NO_RESTRICTIONS: Final = Restrictions()


def parse_restrictions(items: Iterable[str], kind: Literal["api", "protocol"]) -> Restrictions:
    """Parses items `<name>,<name>:<key>=<value>`. Raises ValueError with Triton's text."""
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
        shown = item.rpartition("=")[0] or item  # the value is secret
        raise ValueError(f"--{flag} option format is '<config name>:<setting>=<value>'. Got {shown}")
    return names, key, value
