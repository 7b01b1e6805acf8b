"""What all instances of a PyTorch model share: its file, its settings, and how its tensors are named.

For: instance_state.py. Does not know: requests. Invariant: a configuration whose inputs cannot be matched with the
program's arguments is refused when the model loads, not when a request comes.
Source: the naming rules and parameters of Triton's PyTorch backend.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmbackend.core.backend_api import Model, invalid_argument, not_found, unsupported

from ..model_parameters import boolean, positive, read_parameters
from ..ragged import batch_input_names
from ..sequence_tensors import output_names, sequence_inputs
from .programs import Program, load_exported, load_torchscript

_FILES = ("model.pt", "model.pt2")
_INDEXED = re.compile(r"^.+__(\d+)$")
_PARAMETERS = {
    "INFERENCE_MODE": boolean,
    "DISABLE_OPTIMIZED_EXECUTION": boolean,
    "INTRA_OP_THREAD_COUNT": positive,
}


class ModelState:
    def __init__(self, model: Model) -> None:
        """Raises TritonError naming the file or the field that is wrong."""
        config = model.config
        self.name = model.name
        self.path = _find(model)
        self.settings: dict[str, Any] = read_parameters(config, _PARAMETERS)
        self.inputs = [*(tensor.name for tensor in config.input), *batch_input_names(config), *sequence_inputs(config)]
        self.outputs = in_order(output_names(config))
        if not self.inputs or not self.outputs:
            raise invalid_argument(f"model '{model.name}': a PyTorch model's inputs and outputs must be configured")
        if any(tensor.optional for tensor in config.input):
            raise unsupported(f"model '{model.name}': a PyTorch program has no optional inputs")

    def new_program(self, device: str) -> Program:
        """Raises TritonError INVALID_ARG when the file is none, or takes other arguments than are configured."""
        load = load_exported if self.path.suffix == ".pt2" else load_torchscript
        try:
            program = load(self.path, device, self.settings)
        except Exception as error:  # the loader's own errors are of many kinds
            raise invalid_argument(f"failed to load model '{self.name}': {_first_line(error)}") from None
        arguments = program.arguments
        if arguments is not None and len(arguments) != len(self.inputs):
            raise invalid_argument(
                f"model '{self.name}': inputs are {', '.join(self.inputs)}, but the program's arguments are "
                f"{', '.join(arguments) or 'none'}"
            )
        return program

    def arranged(self, arguments: Sequence[str] | None) -> list[str]:
        """The inputs' names in the order of the program's arguments: by name, else by index, else as configured."""
        if arguments is not None and set(arguments) == set(self.inputs):
            return list(arguments)
        return in_order(self.inputs)


def in_order(names: list[str]) -> list[str]:
    """By the index of names of the form <name>__<index>, if all are; else as they are configured."""
    indices = [int(match[1]) for name in names if (match := _INDEXED.match(name))]
    if len(indices) != len(names):
        return names
    return [name for _, name in sorted(zip(indices, names, strict=True))]


def _find(model: Model) -> Path:
    named = model.config.default_model_filename
    for name in (named,) if named else _FILES:
        path = model.version_directory / name
        if path.exists():
            return path
    raise not_found(f"unable to find '{model.version_directory / (named or _FILES[0])}' for model '{model.name}'")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
