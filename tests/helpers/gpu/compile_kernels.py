"""Compiles kernels for an absent GPU: to its machine code, with their resource usage.

Used by tests that every kernel compiles and spills nothing. The interpreter also runs kernels that do not compile. A
driver that only names its target turns kernel launches into compilations: a test calls the launching code with CPU
tensors and finds what would have been launched. Independent of which kernels. Compilation is impossible in a process
that imported triton for the interpreter, so tests call `compile_in_process`.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any
from unittest import mock

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_BARRIERS = re.compile(r"\b(?:gpu|ttg)\.barrier\b")
_WARPS = re.compile(r"#ttg\.nvidia_mma<\{versionMajor = (\d+),.*?warpsPerCTA = \[(\d+), (\d+)\]")


@dataclass(frozen=True)
class Compiled:
    """One kernel, and what it needs of the hardware."""

    name: str
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread's local memory, spilled registers included."""
    shared_bytes: int
    """Of a block's shared memory."""
    num_warps: int
    products: tuple[tuple[int, int, int], ...]
    """Of its matrix products: generation of the tensor core instruction, warps down, warps across."""
    num_barriers: int
    """That its source asks for; the compiler adds others, for shared memory."""
    programs: int
    """Of its first launch."""


Launch = Callable[[int], None]
"""A function at the top of a module: it launches kernels for a GPU of the compute capability that it is given."""


def compile_in_process(launch: Launch, *capabilities: int) -> dict[int, list[Compiled]]:
    """What the calls in `launch` would launch on a GPU of each compute capability (90: Hopper). Raises
    CalledProcessError, with the compiler's words on stderr, if one fails."""
    found = compile_together(*((launch, capability) for capability in capabilities))
    return {capability: kernels for (_, capability), kernels in found.items()}


def compile_together(*launches: tuple[Launch, int]) -> dict[tuple[Launch, int], list[Compiled]]:
    """The same for several functions, each with a capability, in one process: to import torch takes it seconds."""
    named = [(launch.__module__, launch.__name__, capability) for launch, capability in launches]
    command = [sys.executable, __file__, json.dumps(named)]
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    kernels = (
        [Compiled(**{**entry, "products": tuple(map(tuple, entry["products"]))}) for entry in entries]
        for entries in json.loads(output)
    )
    return dict(zip(launches, kernels, strict=True))


@contextmanager
def recorded_launches(capability: int) -> Iterator[list[Any]]:
    """Compiled kernels of the launches inside, each kernel once, and the grid of its first launch."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: dict[int, tuple[Any, tuple[int, ...]]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.setdefault(id(kernel), (kernel, grid))
        return kernel

    launches: list[Any] = []
    driver.set_active(_target_alone(capability))
    with mock.patch.object(JITFunction, "run", compile_only):
        yield launches
    launches.extend(kernels.values())


def describe(kernel: Any, grid: tuple[int, ...]) -> Compiled:
    registers, stack = _resources(kernel.asm["cubin"])
    products = sorted({(int(a), int(b), int(c)) for a, b, c in _WARPS.findall(kernel.asm["ttgir"])})
    meta, barriers = kernel.metadata, len(_BARRIERS.findall(kernel.asm["ttgir"]))
    programs = math.prod(grid)
    return Compiled(meta.name, registers, stack, meta.shared, meta.num_warps, tuple(products), barriers, programs)


def _target_alone(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget

    device = mock.Mock()
    device.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    device.get_current_device.return_value = capability  # kernels are cached by device
    device.get_current_stream.return_value = 0
    return device


def _resources(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        found = _RESOURCES.search(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found, "cuobjdump says nothing of resources"
    return int(found[1]), int(found[2])


def _main(launches: list[tuple[str, str, int]]) -> None:
    compiled = []
    for module, function, capability in launches:
        with recorded_launches(capability) as kernels:
            getattr(import_module(module), function)(capability)
        compiled.append([asdict(describe(*launched)) for launched in kernels])
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
