"""Runs one step of a `transformers` model: a plan in, sampled tokens out. Its modules compute, or a program made of it.

For: the engine core, as its `Runner`. Does not know: why these rows were chosen, text, clients. Invariants: a request
costs time per step only inside array operations; `execute` changes KV slots alone, so that it can be repeated.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time

import msgspec
import torch

from .adapter_loads import refuse_adapter
from .config import EngineConfig
from .cpu.kv_memory import check_kv_dtype, num_kv_blocks
from .cpu.native_runner import NativeRunner
from .cpu.packed_decoder import PackedModel, PackingPlace
from .errors import ProgramUnsupportedError
from .freed_memory import keep_freed_memory
from .gpu.cpu_device import CpuDevice
from .gpu.current_device import use_gpu
from .gpu.device import CudaDevice, Device
from .gpu.lost_device import noticing_loss
from .gpu.triton_needs import naming_what_triton_needs
from .infer_request import InferRequest, ModelInfo
from .model.loader import LoadedModel, device_of, library_choice, load_model, with_module_adapters
from .model.module_forward import ModuleForward
from .model.packing import pack_model
from .sampling.host_step import HostSteps
from .sampling.torch_sampling import TorchSampler
from .start_parts import note
from .step import RowTable, Runner, SampledTokens, StepPlan

logger = logging.getLogger(__name__)


def make_model_runner(config: EngineConfig) -> Runner:
    """The model on its device. Raises ValueError, OSError or torch.OutOfMemoryError with a text for the user."""
    start_s = time.monotonic()
    if not config.device.startswith("cuda"):
        made = pack_or_run(config)
        return NativeRunner(config, made) if isinstance(made, PackedModel) else made
    use_gpu(device_of(config.device))
    with naming_what_triton_needs():
        return _on_gpu(config, start_s)


def _on_gpu(config: EngineConfig, start_s: float) -> Runner:
    from .gpu.start import start_on_cuda

    loaded = load_model(config)
    try:
        return start_on_cuda(config, loaded, start_s)
    except ProgramUnsupportedError as reason:
        logger.warning("%s runs as transformers modules, one step after the other: %s", loaded.model_type, reason)
    return run_modules_on(CudaDevice(loaded.device), config, loaded)


def run_modules_on(device: Device, config: EngineConfig, loaded: LoadedModel) -> ModelRunner:
    """On an accelerator, with as much KV memory as it has room for. Raises ValueError or torch.OutOfMemoryError."""
    from .gpu.module_memory import num_module_blocks

    check_kv_dtype(config)
    loaded = with_module_adapters(config, loaded)
    if config.num_kv_blocks is None:
        trial = ModelRunner(msgspec.structs.replace(config, num_kv_blocks=1), loaded, device)
        num_blocks = num_module_blocks(config, loaded, device, trial)
        trial.close()
        config = msgspec.structs.replace(config, num_kv_blocks=num_blocks)
    return ModelRunner(config, loaded, device)


def pack_or_run(config: EngineConfig, place: PackingPlace | None = None) -> PackedModel | Runner:
    """A checkpoint on CPU: packed for native runners, in `place`, or its runner where it must run as modules.
    Raises as `make_model_runner`."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(config, new_memory=None if place is None else place.new_memory)
    try:
        packed = pack_model(config, loaded, place)
    except ProgramUnsupportedError as reason:
        logger.info("%s runs as transformers modules: %s", loaded.model_type, reason)
        note(f"transformers modules, because {reason}")
        if loaded.checked.int8:
            loaded.checked.verify_int8_modules(loaded.model)
        if loaded.kernels is not None and (choice := library_choice(config, loaded.dtype)) is not None:
            note(f"kernels {choice.report}")
        return ModelRunner(config, loaded)
    del loaded
    gc.collect()  # the modules are not read again, and refer to each other
    return packed


class ModelRunner:
    def __init__(self, config: EngineConfig, loaded: LoadedModel, device: Device | None = None) -> None:
        """device: None: a CPU. Allocates the KV memory. Raises ValueError with a text for the user."""
        start_s = time.monotonic()
        if device is None and config.transport == "process":
            keep_freed_memory()
        self._device = device or CpuDevice()
        bytes_per_token = sum(shape.bytes_per_token(loaded.dtype) for shape in loaded.layer_shapes.values())
        num_blocks = num_kv_blocks(config, bytes_per_token, loaded.max_model_len)
        self.adapters = loaded.adapters
        self._forward = ModuleForward(loaded, num_blocks, config.block_size)
        self._sampler = TorchSampler(config.max_num_seqs, loaded.vocab_size, loaded.eos_token_ids, loaded.kernels)
        self._steps = HostSteps(self._forward, self._sampler, loaded.vocab_size)
        self._info = ModelInfo(
            model_type=loaded.model_type,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            block_size=config.block_size,
            num_blocks=num_blocks,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            load_s=time.monotonic() - start_s,
            description=_describe(loaded, self._device),
            held_weight_bytes=loaded.weight_bytes,
            kv_bytes=num_blocks * config.block_size * bytes_per_token,
            device_bytes=self._device.held_bytes,
            needs_torch=True,
            path="modules",
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def add_row(self, row: int, request: InferRequest) -> None:
        if self.adapters is not None:
            self.adapters.batch.set_row(row, request.lora_name)
        else:
            refuse_adapter(request.lora_name)
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        with noticing_loss(self._device.synchronize):
            return self._steps.execute(plan, table)

    def close(self) -> None:
        self._forward.close()
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            self._device.trim()


def _describe(loaded: LoadedModel, device: Device) -> str:
    dtype = str(loaded.dtype).removeprefix("torch.")
    if loaded.device.type == "cpu":
        threads = f"{torch.get_num_threads()} threads, {_instructions()}"
        return f"cpu, {dtype}, {threads}, {loaded.linear_kind} linear layers, modules"
    return f"{device.name}, {dtype}, modules"


def _instructions() -> str:
    """The widest instruction set that torch uses."""
    name = torch.backends.cpu.get_cpu_capability()
    return f"{name}+AMX" if torch.cpu._is_amx_tile_supported() else name
