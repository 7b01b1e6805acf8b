"""The parameters of a request or response that a model makes.

For: InferenceRequest and InferenceResponse. Does not know: what parameters mean. Invariant: what comes out is plain and
can be sent by every protocol. Source: PyParametersToJSON of Triton's python backend, and its texts; that an int must
fit into 64 bits is said here, where Triton fails later.
"""

from __future__ import annotations

from typing import Any

from .errors import TritonModelException

ParameterValue = str | int | bool | float
_INT64_BITS = 63


def checked_parameters(given: dict[str, Any] | None) -> dict[str, ParameterValue]:
    """Raises TritonModelException for another type than bool, int and str."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TritonModelException(f"Expect dict, got {type(given)}")
    plain: dict[str, ParameterValue] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        plain[str(name)] = _checked_value(name, value)
    return plain


def _checked_value(name: str, value: Any) -> ParameterValue:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, int):
        raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    if not -(1 << _INT64_BITS) <= value < 1 << _INT64_BITS:
        raise TritonModelException(f"Expect parameter '{name}' to fit into 64 bits, got {value}")
    return int(value)
