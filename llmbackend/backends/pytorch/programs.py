"""PyTorch programs from files: TorchScript archives and programs of torch.export.

For: model_state.py. Does not know: requests, configurations. Invariant: a program is called with tensors in the order
of its arguments and gives a tuple of tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Program:
    """`arguments`: names of the arguments, or None when the file does not tell."""

    call: Callable[..., Any]
    arguments: tuple[str, ...] | None
    device: str

    def run(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        result = self.call(*tensors)
        is_texts = isinstance(result, list) and all(isinstance(item, str) for item in result)
        return tuple(result) if isinstance(result, tuple | list) and not is_texts else (result,)


def load_torchscript(path: Path, device: str, settings: Mapping[str, Any]) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is old, and so are many models
        module = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]
        module.eval()
        schema = module.forward.schema
    optimise = not settings.get("DISABLE_OPTIMIZED_EXECUTION", False)

    def call(*tensors: Any) -> Any:
        try:
            with torch.jit.optimized_execution(optimise):  # type: ignore[attr-defined]
                return module(*tensors)
        except torch.jit.Error as error:  # pages of source code, then what the program raised
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None

    return Program(call, tuple(argument.name for argument in schema.arguments[1:]), device)


def load_exported(path: Path, device: str, settings: Mapping[str, Any]) -> Program:
    exported = torch.export.load(str(path))
    arguments = exported.graph_signature.user_inputs
    return Program(exported.module().to(device), tuple(str(argument) for argument in arguments), device)
