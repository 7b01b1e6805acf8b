"""Imports transformers without torch's compiler and distributed tensors, which an engine on CPU never uses.

Used by everything that imports transformers and loads a model. Why: transformers decorates a few functions for
torch.compile and mentions distributed tensor types, which imports a third of torch, about two seconds and 100 MB per
engine. Invariants: they are only left out inside `without_compiler`, so a later `import torch._dynamo` finds the real
one; if the compiler is already imported, nothing is left out.
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

_COMPILER = "torch._dynamo"
_HELPER = f"{_COMPILER}._trace_wrapped_higher_order_op"
_DECORATORS = ("allow_in_graph", "assume_constant_result")
_KEPT_BY_TORCH = "__dynamo_disable"
"""Function attribute in which torch caches the result of the compiler's `disable` after the first call."""
_lock = threading.RLock()


def import_for(model: str) -> None:
    """Imports what loading the checkpoint in directory `model` needs, as far as can be known without loading it."""
    try:
        with without_compiler():
            _import_architecture(model)
    except Exception:  # another release may need more of it; loading the model imports again
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
    """One thread at a time. While active, torch finds stand-in modules in place of the compiler, and reports that it
    was built without distributed tensors."""
    import torch.compiler
    import torch.distributed

    with _lock:
        if _COMPILER in sys.modules:
            yield
            return
        disabled: list[Any] = []
        stand_ins = _stand_ins(disabled)
        is_available = torch.distributed.is_available
        sys.modules.update(stand_ins)
        torch.distributed.is_available = lambda: False
        try:
            yield
        finally:
            torch.distributed.is_available = is_available
            for name in stand_ins:
                sys.modules.pop(name, None)
            for function in disabled:  # the real compiler must be consulted once it is imported
                vars(function).pop(_KEPT_BY_TORCH, None)


def _stand_ins(disabled: list[Any]) -> dict[str, ModuleType]:
    """A compiler whose decorators return functions unchanged; `disabled` collects those marked not to be compiled."""

    def disable(function: Any = None, *_arguments: Any, **_options: Any) -> Any:
        if function is not None:
            disabled.append(function)
        return _unchanged(function)

    compiler: Any = ModuleType(_COMPILER)
    helper: Any = ModuleType(_HELPER)
    compiler.__path__ = []
    compiler.disable = disable
    for name in _DECORATORS:
        setattr(compiler, name, _unchanged)
    helper.TransformGetItemToIndex = object
    return {_COMPILER: compiler, _HELPER: helper}


def _unchanged(function: Any = None, *_arguments: Any, **_options: Any) -> Any:
    return function if function is not None else _unchanged
