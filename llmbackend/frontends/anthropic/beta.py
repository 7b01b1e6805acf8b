"""Fields that this server does not act on: refused by name, or noted where the request names betas.

For: the readers of bodies. Does not know: which fields there are. Invariant: without an `anthropic-beta` header every
such field is refused; with one, fields are passed over and named in the log, and content never is: a block or a tool
that the model could not see is refused in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Final

from ..openai.errors import OpenAIError, missing, refuse

log = logging.getLogger(__name__)
_MAX_NOTED: Final = 16
_MAX_NAME_CHARS: Final = 64


class BetaFields:
    """Of one body. Owner: its reader."""

    def __init__(self, betas: str) -> None:
        """betas: the header `anthropic-beta`, "" without one"""
        self._betas = betas.strip()
        self.passed_over: list[str] = []

    @property
    def are_named(self) -> bool:
        return bool(self._betas)

    def unserved(self, param: str, reason: str = "") -> None:
        """Raises OpenAIError for the field `param` of a request without betas. reason: why it is not served; "" for a
        field that nobody knows."""
        if not self._betas:
            if reason:
                message = f"'{param}' is not supported: {reason}"
                raise OpenAIError(message, param=param, code="unsupported_parameter")
            raise OpenAIError(f"unknown field '{param}'", param=param, code="unknown_parameter")
        if len(self.passed_over) < _MAX_NOTED:
            self.passed_over.append(param[:_MAX_NAME_CHARS])

    def check_names(self, value: Mapping[str, Any], known: Collection[str], param: str) -> None:
        """Of the object `param`; null is the same as a field left out."""
        if value.keys() <= set(known):
            return
        for name in value:
            if name not in known and value[name] is not None:
                self.unserved(f"{param}.{name}" if param else name)

    def write_log(self) -> None:
        if self.passed_over:
            log.debug("fields under 'anthropic-beta: %s' that are passed over: %s", self._betas, self.passed_over)


def an_object(value: object, param: str) -> dict[str, Any]:
    if value is None:
        raise missing(param)
    if not isinstance(value, dict):
        raise refuse(param, "an object", value)
    return value


def a_list(value: object, param: str) -> list[Any]:
    if value is None:
        raise missing(param)
    if not isinstance(value, list):
        raise refuse(param, "a list", value)
    return value


def a_string(value: object, param: str, *, may_be_empty: bool = False) -> str:
    if value is None:
        raise missing(param)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise refuse(param, "a string" if may_be_empty else "a non-empty string", value)
    return value


def a_flag(value: object, param: str) -> bool:
    """False where it is left out."""
    if value is not None and not isinstance(value, bool):
        raise refuse(param, "true or false", value)
    return bool(value)


def check_cache_control(value: object, param: str, beta: BetaFields) -> None:
    """A mark in the prompt up to which a client wants it cached. Every prefix is cached here, whole blocks of it, as
    long as there is room, so that the mark needs no action."""
    if value is None:
        return
    mark = an_object(value, param)
    if mark.get("type") != "ephemeral":
        raise refuse(f"{param}.type", '"ephemeral"', mark.get("type"))
    if mark.get("ttl") not in (None, "5m", "1h"):
        raise refuse(f"{param}.ttl", '"5m" or "1h"', mark["ttl"])
    beta.check_names(mark, ("type", "ttl"), param)
