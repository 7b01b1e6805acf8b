"""The NVIDIA GPUs that this process may use, as reported by the driver's management library (NVML).

torch is not asked because its import takes seconds, nor CUDA because its initialisation takes memory on every GPU. Ids
are CUDA's: they count the visible GPUs from 0 in bus order, an order that engines set too (gpu/device.py). A host whose
driver is missing or does not answer has no GPUs.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from .errors import invalid_argument

log = logging.getLogger(__name__)

STAND_IN = "LLMBACKEND_GPUS"
"""Environment variable for tests: ids of this host's GPUs ("0,1"; "" = none), instead of the driver's."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
MIN_COMPUTE_CAPABILITY = 6.0
_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """A GPU of the machine. instances: names of its MIG instances."""

    uuid: str
    compute_capability: float
    instances: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostGpus:
    """The GPUs for model instances: ids, ascending, of the visible ones with at least `min_compute_capability`."""

    ids: tuple[int, ...]
    min_compute_capability: float

    @classmethod
    def find(cls, settings: Mapping[str, Mapping[str, str]]) -> HostGpus:
        """settings: ServerOptions.backend_config. Raises TritonError INVALID_ARG for an invalid compute capability, or
        if the environment variable STAND_IN is invalid."""
        text = settings.get("", {}).get("min-compute-capability", str(MIN_COMPUTE_CAPABILITY))
        try:
            minimum = float(text)
        except ValueError:
            raise invalid_argument(f"backend config 'min-compute-capability' is '{text}', expected a number") from None
        try:
            return cls(supported_gpus(minimum), minimum)
        except ValueError as error:
            raise invalid_argument(str(error)) from None


def supported_gpus(min_compute_capability: float = MIN_COMPUTE_CAPABILITY) -> tuple[int, ...]:
    """Ids of the visible GPUs with at least this compute capability, ascending. Raises ValueError if the environment
    variable STAND_IN is invalid."""
    stand_in = os.environ.get(STAND_IN)
    if stand_in is not None:
        return _parse(stand_in)
    shown = visible_gpus(_devices(), os.environ)
    _warn_of_names(os.environ.get(VISIBLE_DEVICES, ""), os.environ.get(DEVICE_ORDER, ""), bool(shown))
    return tuple(i for i, gpu in enumerate(shown) if gpu.compute_capability >= min_compute_capability)


def visible_gpus(gpus: Sequence[DriverGpu], environment: Mapping[str, str]) -> list[DriverGpu]:
    """The GPUs visible to CUDA, in CUDA's order. As in CUDA, the list ends before the first name that matches no GPU or
    repeats one, and after a MIG instance, since a process can use only one."""
    wanted = environment.get(VISIBLE_DEVICES)
    if wanted is None:
        return list(gpus)
    shown: list[int] = []
    for name in (part.strip() for part in wanted.split(",")):
        found = [i for i, gpu in enumerate(gpus) if name == str(i) or (not name.isdigit() and _names(name, gpu))]
        if len(found) != 1 or found[0] in shown:
            break
        shown += found
        if name.startswith("MIG-"):
            break
    return [gpus[i] for i in shown]


def _names(name: str, gpu: DriverGpu) -> bool:
    return (name.startswith("GPU-") and gpu.uuid.startswith(name)) or name in gpu.instances


@cache
def _warn_of_names(wanted: str, order: str, is_one_shown: bool) -> None:
    """Warns once per setting."""
    if wanted and wanted != "-1" and _devices() and not is_one_shown:
        log.warning("%s is '%s', which names none of this host's %d GPUs", VISIBLE_DEVICES, wanted, len(_devices()))
    if order == "FASTEST_FIRST" and len({gpu.compute_capability for gpu in _devices()}) > 1:
        log.warning("%s is '%s', but ids follow the order of the GPUs on the bus", DEVICE_ORDER, order)


def _parse(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise ValueError(f"environment variable {STAND_IN} is '{text}', expected comma-separated GPU ids") from None


@cache
def _devices() -> tuple[DriverGpu, ...]:
    """The GPUs of the machine in bus order."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        log.warning("the NVIDIA driver does not answer: assuming that this host has no GPU")
        return ()
    try:
        return driver_gpus(nvml)
    finally:
        nvml.nvmlShutdown()


def driver_gpus(nvml: ctypes.CDLL) -> tuple[DriverGpu, ...]:
    """nvml: initialised library."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return tuple(_gpu(nvml, index) for index in range(count.value))


def _gpu(nvml: ctypes.CDLL, index: int) -> DriverGpu:
    """A GPU that does not answer gets compute capability 0, so that the ids of the others do not shift."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) or nvml.nvmlDeviceGetCudaComputeCapability(
        handle, ctypes.byref(major), ctypes.byref(minor)
    )
    uuid = "" if failed else _uuid(nvml, handle)
    if not uuid:
        return DriverGpu("", 0.0)
    return DriverGpu(uuid, major.value + minor.value / 10, tuple(_instances(nvml, handle, uuid)))


def _instances(nvml: ctypes.CDLL, gpu: ctypes.c_void_p, gpu_uuid: str) -> Iterator[str]:
    """Both names of each MIG instance: the current form, and the form of drivers before 470."""
    count, instance = ctypes.c_uint(), ctypes.c_void_p()
    if nvml.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(count)):
        return
    for index in range(count.value):
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(instance)):
            continue
        if uuid := _uuid(nvml, instance):
            yield uuid
        slices, units = ctypes.c_uint(), ctypes.c_uint()
        if not (
            nvml.nvmlDeviceGetGpuInstanceId(instance, ctypes.byref(slices))
            or nvml.nvmlDeviceGetComputeInstanceId(instance, ctypes.byref(units))
        ):
            yield f"MIG-{gpu_uuid}/{slices.value}/{units.value}"


def _uuid(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    """Empty if the driver does not answer."""
    uuid = ctypes.create_string_buffer(_UUID_BYTES)
    return "" if nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES) else uuid.value.decode("ascii", "replace")
