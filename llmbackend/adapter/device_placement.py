"""Chooses the device of an instance's engine by the kind of its instance group. Contradictions are refused by name.

Source: Triton's instance groups; vllm_backend's rule that an engine over several GPUs is KIND_MODEL.
"""

from __future__ import annotations

import threading
from collections import Counter
from importlib import metadata

import msgspec

from llmbackend.core.backend_api import InstanceGroupKind, invalid_argument
from llmbackend.core.gpus import supported_gpus
from llmbackend.engine.config import EngineConfig

AUTO = "auto"
"""Default of the engine argument 'device': a GPU if there is one."""


class DevicePlacement:
    """Assigns devices to the engines of a process (HOST_DEVICES). Thread-safe.

    KIND_GPU: the instance's own GPU. KIND_CPU: the CPU. KIND_MODEL: the GPUs with the fewest engines. In TensorRT-LLM's
    llmapi layout KIND_CPU means the same as KIND_MODEL, because it refers to the process of model.py.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks_at: Counter[str] = Counter()

    def place(
        self,
        config: EngineConfig,
        instance_name: str,
        kind: InstanceGroupKind,
        device_id: int,
        is_llmapi: bool = False,
    ) -> EngineConfig:
        """The arguments of an instance's engine with its device; pass them to `leave` when the engine has ended. Raises
        TritonError INVALID_ARG."""
        with self._lock:
            device = self._device(config, instance_name, kind, device_id, is_llmapi)
            placed = msgspec.structs.replace(config, device=device)
            self._ranks_at.update(_devices_of_ranks(placed))
        return placed

    def leave(self, config: EngineConfig) -> None:
        with self._lock:
            self._ranks_at.subtract(_devices_of_ranks(config))

    def _device(
        self, config: EngineConfig, instance_name: str, kind: InstanceGroupKind, device_id: int, is_llmapi: bool
    ) -> str:
        if kind is InstanceGroupKind.GPU:
            return _own_gpu(config, device_id)
        if kind is InstanceGroupKind.CPU and not is_llmapi:
            if config.device not in (AUTO, "cpu"):
                raise invalid_argument(
                    f"engine argument 'device' is '{config.device}', but the instance group of '{instance_name}' is "
                    "KIND_CPU"
                )
            return "cpu"
        gpus = supported_gpus()
        if config.device == "cuda" or (config.device == AUTO and gpus and _may_use_gpus(config)):
            return self._least_used(config, gpus)
        return "cpu" if config.device == AUTO else config.device

    def _least_used(self, config: EngineConfig, gpus: tuple[int, ...]) -> str:
        """The first of the neighbouring GPUs, one per rank; "cuda:0" if the driver lists none."""
        width = config.num_ranks
        if gpus and len(gpus) < width:
            ranks = "" if config.pipeline_parallel_size == 1 else f", which makes {width} ranks"
            raise invalid_argument(f"{config.split}{ranks}, expected at most {len(gpus)}, the GPUs of this host")
        starts = [gpus[i] for i in range(0, len(gpus) - width + 1, width)]
        first = min(starts, key=lambda start: sum(self._ranks_at[device] for device in _gpus(start, width)), default=0)
        return f"cuda:{first}"


HOST_DEVICES = DevicePlacement()
"""Of the engines of all models that this process serves."""


def _devices_of_ranks(config: EngineConfig) -> list[str]:
    if not config.device.startswith("cuda"):
        return [config.device]
    return _gpus(int(config.device.partition(":")[2] or 0), config.num_ranks)


def _gpus(first: int, count: int) -> list[str]:
    return [f"cuda:{gpu}" for gpu in range(first, first + count)]


def _own_gpu(config: EngineConfig, gpu: int) -> str:
    if config.num_ranks > 1:
        raise invalid_argument(
            f"{config.split}: KIND_GPU is for models on a single GPU, please specify KIND_MODEL in the model's "
            "config.pbtxt for a model over several"
        )
    return f"cuda:{gpu}"


def _may_use_gpus(config: EngineConfig) -> bool:
    """Whether the engine's torch is built for GPUs, judging by its version; a mock engine has no torch."""
    if config.model == "mock":
        return False
    if config.engine_python:
        return True
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True
