"""The GPU of this process: checked, and made the current one before anything is put on it.

For: whatever loads a model on a GPU, first of all. Does not know: models, ranks. Invariants: Triton launches kernels on
the current device of a thread, and pinned memory belongs to that device's context, so that a process which computes on
`cuda:3` has it as its current device from the first call on; ids count GPUs in the order of their bus, as the host's
list does (core/gpus.py), unless CUDA_DEVICE_ORDER says otherwise.
"""

from __future__ import annotations

import os

import torch


def use_gpu(device: torch.device) -> torch.device:
    """Makes it the current device of this thread. Returns it with its index. Raises ValueError as `check_gpu`."""
    check_gpu(device)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def check_gpu(device: torch.device) -> None:
    """Raises ValueError when this torch cannot compute on it."""
    subject = f"engine argument 'device' is '{device}', but this torch ({torch.__version__})"
    if torch.version.hip is not None:
        raise ValueError(f"{subject} is built for ROCm, expected a CUDA build: the engine's kernels are NVIDIA's only")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # read when torch first asks for devices
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"{subject} sees no CUDA device")
    if (device.index or 0) >= count:
        raise ValueError(f"{subject} sees {count} CUDA devices, from 0 on")
