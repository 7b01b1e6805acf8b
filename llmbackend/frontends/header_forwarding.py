"""Headers and metadata of a request that its model is to see: they become string parameters.

For: /infer over HTTP, ModelInfer and ModelStreamInfer over gRPC (not generate, as in Triton). Does not know: models.
Invariants: only what the operator's pattern names is forwarded; a forwarded header wins over a parameter of the same
name in the body, so that what a proxy in front says cannot be forged; names keep the case in which the client sent
them (which an HTTP server forgets, see `http_header_case.py`).
Source: --http-header-forward-pattern and --grpc-header-forward-pattern: regular expressions of RE2, found anywhere in a
name, without regard to case unless they say `(?-i)` (golden 60); reserved names as Triton's QA has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from llmbackend.core.backend_api import ParameterValue
from llmbackend.core.errors import invalid_argument

from .request_parameters import RequestOptions

_RESERVED: Final = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)
_RESERVED_PREFIX: Final = "triton_"

Headers = Iterable[tuple[str | bytes, str | bytes]] | Any
"""gRPC's metadata is None when there is none."""


class _Pattern(Protocol):
    def search(self, text: str, /) -> object | None: ...


@dataclass(frozen=True, slots=True)
class HeaderForward:
    """`pattern` None: nothing is forwarded."""

    pattern: _Pattern | None = None

    @classmethod
    def of(cls, pattern: str) -> HeaderForward:
        """Raises ValueError for what is no regular expression; "" forwards nothing."""
        return cls(_compiled(pattern) if pattern else None)

    def __bool__(self) -> bool:
        return self.pattern is not None

    def added(self, parameters: Mapping[str, ParameterValue], headers: Headers) -> Mapping[str, ParameterValue]:
        """`parameters` with those of `headers` (name and value each) that are to be forwarded.

        Raises TritonError INVALID_ARG when one of them has a name that is reserved.
        """
        if self.pattern is None:
            return parameters
        found: dict[str, ParameterValue] = {}
        for name, value in headers or ():
            key = name.decode("latin-1") if isinstance(name, bytes) else name
            if self.pattern.search(key):
                if key.lower() in _RESERVED or key.lower().startswith(_RESERVED_PREFIX):
                    raise invalid_argument(
                        f"header '{key}' can not be forwarded: parameter key '{key}' is reserved for Triton usage"
                    )
                found[key] = value.decode("latin-1") if isinstance(value, bytes) else value
        return {**parameters, **found} if found else parameters

    def into(self, options: RequestOptions, headers: Headers) -> RequestOptions:
        """As `added`, for the options of a gRPC request."""
        return replace(options, parameters=self.added(options.parameters, headers))


def _compiled(pattern: str) -> _Pattern:
    import re2  # a server that forwards nothing starts without it

    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    try:
        compiled: _Pattern = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        raise ValueError(reason.decode() if isinstance(reason, bytes) else str(reason)) from None
    return compiled


FORWARD_NOTHING: Final = HeaderForward()
