"""What a load that failed says, with Triton's texts.

For: the life cycle and load operations. Does not know: how anything is loaded. Source: golden transcripts 07, 50, 51.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future

from llmbackend.core.errors import ErrorCode, TritonError, as_triton_error, internal
from llmbackend.core.models.model import LoadedModel

from .model_versions import ModelState


class LoadError(TritonError):
    """No version of a model was changed, because of `reason`. INVALID_ARG. causes: the errors of its versions."""

    def __init__(self, name: str, reason: str, causes: Sequence[TritonError] = ()) -> None:
        super().__init__(f"load failed for model '{name}': {reason}", ErrorCode.INVALID_ARG)
        self.reason = reason.rstrip("\n")
        self.causes = tuple(causes)


class StartupError(TritonError):
    """The server did not start because of models that failed. INTERNAL. reasons: by model, without what Triton puts
    around them."""

    def __init__(self, errors: Mapping[str, TritonError]) -> None:
        super().__init__("failed to load all models", ErrorCode.INTERNAL)
        self.reasons = {name: _plain(error) for name, error in errors.items()}


def _plain(error: TritonError) -> str:
    if not isinstance(error, LoadError):
        return str(error.__cause__ or error)
    return "; ".join(dict.fromkeys(cause.message for cause in error.causes)) or error.reason


def what_failed(errors: Mapping[int, TritonError], updated: Collection[int]) -> str:
    """Of a load whose versions `updated` were to be changed in place: a version that could not be still serves."""
    states = {version: ModelState.READY if version in updated else ModelState.UNAVAILABLE for version in errors}
    return "".join(
        f"version {version} is at {states[version].value} state: {error.status};\n" for version, error in errors.items()
    )


def error_of(future: Future[LoadedModel]) -> TritonError | None:
    error = future.exception()
    if error is None:
        return None
    if not isinstance(error, Exception):
        return internal(f"{type(error).__name__}: {error}")
    return as_triton_error(error)
