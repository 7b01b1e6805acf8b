"""The limits of this device: bytes copied and bfloat16 products per second.

    python -m benchmarks.accelerator.ceilings --device cuda --json FILE

For: the shares that the report gives. Does not know: engines. Invariant: data is random (products of zeros are faster)
and several times larger than any cache.
"""

from __future__ import annotations

from typing import Any

from .part import Part, seconds_per_call

COPY_BYTES, SMALL_COPY_BYTES = 4 << 30, 64 << 20
MATRIX_SIZE, SMALL_MATRIX_SIZE = 8192, 512


def measure(part: Part) -> None:
    import torch

    on_gpu = part.device.startswith("cuda")
    device = torch.device(part.device if on_gpu else "cpu")
    part.add(
        device_name=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        copy_bytes_per_s=_copy_bytes_per_s(COPY_BYTES if on_gpu else SMALL_COPY_BYTES, device),
        matmul_flops=_matmul_flops(MATRIX_SIZE if on_gpu else SMALL_MATRIX_SIZE, device),
    )


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
    Part.run("ceilings", measure)
