"""The limits of this device: bytes copied and bfloat16 products per second.

    python -m benchmarks.accelerator.ceilings --device cuda --json FILE

For the percentages in the report. Independent of engines. Invariant: data is random (products of zeros are faster) and
several times larger than any cache.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .section import Section, run_alone, seconds_per_call

COPY_BYTES, SMALL_COPY_BYTES = 4 << 30, 64 << 20
MATRIX_SIZE, SMALL_MATRIX_SIZE = 8192, 512


def measure(section: Section) -> None:
    import torch

    on_gpu, device = section.on_gpu, torch.device(section.device)
    section.add(measure="machine", **_machine(device))
    section.add(
        measure="ceilings",
        device_name=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        copy_bytes_per_s=_copy_bytes_per_s(COPY_BYTES if on_gpu else SMALL_COPY_BYTES, device),
        matmul_flops=_matmul_flops(MATRIX_SIZE if on_gpu else SMALL_MATRIX_SIZE, device),
    )


def _machine(device: Any) -> dict[str, Any]:
    """What a report must name, and what Triton needs when it compiles."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()}
    found |= {name: version(name) for name in ("triton", "transformers")}
    found["compiler"] = shutil.which("gcc") or shutil.which("clang") or "none"
    found["python_headers"] = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        found["compute_capability"] = torch.cuda.get_device_capability(device)
    return found


def _copy_bytes_per_s(num_bytes: int, device: Any) -> float:
    """Bytes read plus bytes written."""
    import torch

    source = torch.randint(255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(lambda: target.copy_(source), device)


def _matmul_flops(size: int, device: Any) -> float:
    import torch

    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2.0 * size**3 / seconds_per_call(lambda: left @ right, device)


if __name__ == "__main__":
    run_alone("ceilings", measure)
