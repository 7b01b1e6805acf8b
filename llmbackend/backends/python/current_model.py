"""Which model's code is running: what `pb_utils.get_model_dir` and `pb_utils.MetricFamily` need and no argument tells
them.

For: the host side enters the scope around each call into a model; pb_utils reads it. Does not know: what the model
does. Invariant: set during import, auto_complete_config, initialize, execute (and coroutines started by it) and
finalize; unset in threads that a model starts itself, where reading it is a clear error and not another model's
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from llmbackend.core.backend_api import Model

_current: ContextVar[Model | None] = ContextVar("current_model", default=None)


@contextmanager
def model_scope(model: Model) -> Iterator[None]:
    token = _current.set(model)
    try:
        yield
    finally:
        _current.reset(token)


def current_model(asked_by: str) -> Model:
    """The running model. Raises RuntimeError naming `asked_by` outside the model's own calls."""
    model = _current.get()
    if model is None:
        raise RuntimeError(
            f"pb_utils.{asked_by} must be used in initialize, execute or finalize of a model, "
            "not in a thread that the model started"
        )
    return model
