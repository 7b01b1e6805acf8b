"""Transformers without torch's compiler and distributed tensors, which an engine on CPU never uses.

For: whoever imports transformers and loads a model. Does not know: models. Why: transformers decorates a few functions
for torch.compile and names distributed tensor types, and by that imports a third of torch: about two seconds and 100 MB
of every engine. Invariants: what is left out is left out inside `without_compiler` alone, so a later `import
torch._dynamo` finds the real one; where it is there already, nothing is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_COMPILER = "torch._dynamo"
_HELPER = f"{_COMPILER}._trace_wrapped_higher_order_op"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
# Where torch keeps, on a function, what the compiler's `disable` made of it at its first call.
_KEPT_BY_TORCH = "__dynamo_disable"
_lock = threading.RLock()


def import_for(model: str) -> None:
    """Imports what loading the checkpoint in directory `model` takes, as far as that is known without loading it."""
    try:
        with without_compiler():
            _import_architecture(model)
    except Exception:  # another release may need more of it; whoever loads the model imports again
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def _import_architecture(model: str) -> None:
    transformers = importlib.import_module("transformers")
    for name in ("AutoModelForCausalLM", *_architectures(model)):
        with contextlib.suppress(AttributeError):
            getattr(transformers, name)


def _architectures(model: str) -> list[str]:
    config = Path(model) / "config.json"
    return (json.loads(config.read_text()).get("architectures") or []) if config.is_file() else []


@contextmanager
def without_compiler() -> Iterator[None]:
    """One thread at a time."""
    import torch.compiler
    import torch.distributed

    with _lock:
        if _COMPILER in sys.modules:
            yield
            return
        disabled: list[Any] = []
        compiler = _stand_in(disabled)
        with (
            mock.patch.object(torch, "_dynamo", compiler, create=True),
            mock.patch.object(torch.compiler, "disable", _unchanged),
            mock.patch.object(torch.distributed, "is_available", lambda: False),
        ):
            try:
                yield
            finally:
                for name in (_COMPILER, _HELPER):
                    sys.modules.pop(name, None)
                for function in disabled:  # the real compiler must be asked when it is there
                    vars(function).pop(_KEPT_BY_TORCH, None)


def _stand_in(disabled: list[Any]) -> ModuleType:
    """A compiler whose decorators leave functions as they are; `disabled` collects those it was to leave alone."""

    def disable(function: Any = None, *_arguments: Any, **_options: Any) -> Any:
        if function is not None:
            disabled.append(function)
        return _unchanged(function)

    compiler: Any = ModuleType(_COMPILER)
    helper: Any = ModuleType(_HELPER)
    compiler.__path__ = []
    for name in _DECORATORS:
        setattr(compiler, name, _unchanged)
    compiler.disable = disable
    helper.TransformGetItemToIndex = object
    sys.modules.update({_COMPILER: compiler, _HELPER: helper})
    return compiler  # type: ignore[no-any-return]


def _unchanged(function: Any = None, *_arguments: Any, **_options: Any) -> Any:
    return function if function is not None else _unchanged
