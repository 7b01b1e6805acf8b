"""Runs the steps of a transformers model as modules, with paged attention, if no program can compute it.

The engine core's `Runner`; `make_model_runner` chooses the program if there is one. Invariants: per step, a request
costs time only inside array operations; the KV of a step's tokens is written before it is read; `execute` changes only
KV slots, so it can be repeated.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from typing import Protocol

import msgspec
import numpy as np
import torch

from llmbackend.fork_server.process_resources import keep_freed_memory

from ..adapter_loads import refuse_adapter
from ..attention.interface import AttentionContext, active_context
from ..attention.native_attention import NativePagedAttention, native_kv_memory
from ..attention.reference import LayerKVCache, PagedAttention, RaggedBatch
from ..config import EngineConfig
from ..cpu.native_memory import check_kv_dtype, num_kv_blocks
from ..cpu.native_runner import NativeRunner, why_modules
from ..cpu.packed_decoder import PackedModel, PackingPlace
from ..cpu_threads import engine_threads
from ..errors import ProgramUnsupportedError
from ..gpu.device import CpuDevice, CudaDevice, Device, noticing_loss, use_gpu
from ..gpu.triton_needs import naming_what_triton_needs
from ..load_progress import note
from ..messages import InferRequest, ModelInfo
from ..sampling.sampler import Float32Array, HostSteps
from ..sampling.torch_sampling import TorchSampler
from ..step import FlatStep, Int32Array, RowTable, Runner, SampledTokens, StepPlan, flatten
from .compatibility import is_recurrent, needs_program
from .loader import LoadedModel, device_of, library_choice, load_model, with_module_adapters
from .packing import pack_model


class _Attention(Protocol):
    def begin(self, plan: StepPlan, table: RowTable) -> tuple[FlatStep, AttentionContext]:
        """The plan as one flat batch, in the order that this attention needs, and the attention context of the step."""


class ModuleForward:
    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._loras = None if loaded.adapters is None else loaded.adapters.batch
        self._attention = _make_attention(loaded, num_blocks, block_size)
        self._hidden: object = None
        """The layers' output for the last step's batch."""
        self._step: FlatStep
        base = self._model.base_model
        self._layers = getattr(base, "decoder", base)
        """The module whose output is the head's input: in models with a separate decoder (OPT), not the base model
        itself."""
        self._hook = self._layers.register_forward_hook(self._keep_hidden)

    @torch.inference_mode()
    def logits(self, plan: StepPlan, table: RowTable) -> torch.Tensor | None:
        """Logits [samples, vocab] in the model's dtype; None if no row samples (the output head is skipped)."""
        step, context = self._attention.begin(plan, table)
        self._step = step
        if self._loras is not None:
            self._loras.begin(step)
        with active_context(context):
            return self._run(step)

    def close(self) -> None:
        self._hook.remove()
        del self._attention, self._hidden, self._layers
        self._model = None

    def _run(self, step: FlatStep) -> torch.Tensor | None:
        inputs = {
            "input_ids": self._to_device(step.token_ids)[None],
            "position_ids": self._to_device(step.positions)[None],
            "use_cache": False,
        }
        if not len(step.sampled_tokens):
            self._model.base_model(**inputs)
            return None
        output = self._model(**inputs, logits_to_keep=self._to_device(step.sampled_tokens))
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def logits_behind(self, row: int, positions: Int32Array) -> Float32Array:
        """Calls the model once more, with the layers' output of the last step in place of its layers."""
        hidden = self._hidden
        self._layers.forward = lambda *args, **kwargs: hidden
        try:
            tokens = self._step.tokens_at(row, positions)
            output = self._model(input_ids=self._to_device(self._step.token_ids)[None], use_cache=False,
                                 logits_to_keep=self._to_device(tokens))  # fmt: skip
        finally:
            del self._layers.forward
        logits: Float32Array = output.logits[0].float().cpu().numpy()
        return logits

    def _keep_hidden(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._hidden = output

    def _to_device(self, array: Int32Array) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _make_attention(loaded: LoadedModel, num_blocks: int, block_size: int) -> _Attention:
    """Native attention if every layer fits its layout, else torch's."""
    if loaded.kernels is not None:
        memory = native_kv_memory(loaded.kernels, loaded.layer_shapes, num_blocks, block_size, loaded.dtype)
        if memory is not None:
            return _OnNative(NativePagedAttention(loaded.kernels, loaded.layer_shapes, memory))
    return _OnTorch(loaded, num_blocks, block_size)


class _OnNative:
    def __init__(self, attention: NativePagedAttention) -> None:
        self._attention = attention

    def begin(self, plan: StepPlan, table: RowTable) -> tuple[FlatStep, AttentionContext]:
        step = flatten(plan, table)
        self._attention.begin(step, step.blocks_in_use(table)[0])
        return step, self._attention


class _OnTorch:
    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int) -> None:
        self._device = loaded.device
        self._caches = {
            layer: LayerKVCache(shape, num_blocks, block_size, loaded.dtype, loaded.device)
            for layer, shape in loaded.layer_shapes.items()
        }

    def begin(self, plan: StepPlan, table: RowTable) -> tuple[FlatStep, AttentionContext]:
        step = flatten(plan, table, _by_length(plan, table))
        batch = RaggedBatch(
            step.query_lens.astype(np.int64),
            step.seq_lens.astype(np.int64),
            table.block_table[step.rows],
            step.slots.astype(np.int64),
            table.block_size,
            self._device,
        )
        return step, PagedAttention(self._caches, batch)


def _by_length(plan: StepPlan, table: RowTable) -> Int32Array:
    """Sorts rows by query length, then context, as RaggedBatch requires."""
    counts = plan.num_scheduled_tokens
    order: Int32Array = np.lexsort((table.num_computed_tokens[plan.rows] + counts, counts)).astype(np.int32)
    return order


logger = logging.getLogger(__name__)


def make_model_runner(config: EngineConfig) -> Runner:
    """The model on its device. Raises ValueError, OSError or torch.OutOfMemoryError with a message for the user."""
    start_s = time.monotonic()
    if not config.device.startswith("cuda"):
        made = pack_or_run(config)
        return NativeRunner(config, made) if isinstance(made, PackedModel) else made
    use_gpu(device_of(config.device))
    with naming_what_triton_needs():
        return _on_gpu(config, start_s)


def _on_gpu(config: EngineConfig, start_s: float) -> Runner:
    from ..gpu.make_gpu_runner import start_on_cuda

    loaded = load_model(config)
    try:
        return start_on_cuda(config, loaded, start_s)
    except ProgramUnsupportedError as error:
        reason = str(error)
    # Outside of the except block, because the error's traceback holds the program's memory.
    logger.warning("%s runs as transformers modules, one step after the other: %s", loaded.model_type, reason)
    return run_modules_on(CudaDevice(loaded.device), config, loaded, reason)


def run_modules_on(device: Device, config: EngineConfig, loaded: LoadedModel, reason: str = "") -> ModelRunner:
    """On an accelerator, with as much KV memory as fits. Raises ValueError or torch.OutOfMemoryError."""
    from ..gpu.make_gpu_runner import num_module_blocks

    check_kv_dtype(config)
    loaded = with_module_adapters(config, loaded)
    if config.num_kv_blocks is None:
        trial = ModelRunner(msgspec.structs.replace(config, num_kv_blocks=1), loaded, device)
        num_blocks = num_module_blocks(config, loaded, device, trial)
        trial.close()
        config = msgspec.structs.replace(config, num_kv_blocks=num_blocks)
    return ModelRunner(config, loaded, device, reason)


def pack_or_run(config: EngineConfig, place: PackingPlace | None = None) -> PackedModel | Runner:
    """A checkpoint on CPU: packed for native runners, in `place`, or its runner if it must run as modules. Raises as
    `make_model_runner` does."""
    # By default no more than torch's own number, which follows OMP_NUM_THREADS.
    torch.set_num_threads(config.num_threads or min(torch.get_num_threads(), engine_threads(config)))
    loaded = load_model(config, new_memory=None if place is None else place.new_memory)
    try:
        packed = pack_model(config, loaded, place)
    except ProgramUnsupportedError as reason:
        if is_recurrent(loaded.model.config):
            raise needs_program(loaded.model.config, str(reason)) from reason
        level = logging.INFO if why_modules(config) else logging.WARNING  # requested, or slower than necessary
        logger.log(level, "%s runs as transformers modules: %s", loaded.model_type, reason)
        note(f"transformers modules, because {reason}")
        loaded = with_module_adapters(config, loaded)
        if loaded.checked.quantization is not None:
            loaded.checked.verify_quantized_modules(loaded.model)
        if loaded.kernels is not None and (choice := library_choice(config, loaded.dtype)) is not None:
            note(f"kernels {choice.report}")
        return ModelRunner(config, loaded, reason=str(reason))
    del loaded
    gc.collect()  # the modules are no longer needed, and reference each other
    return packed


class ModelRunner:
    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, device: Device | None = None, reason: str = ""
    ) -> None:
        """device: None = a CPU. reason: why no program computes. Allocates the KV memory. Raises ValueError with a
        message for the user."""
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
            path_reason=reason,
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
        with contextlib.suppress(RuntimeError):  # the device may be lost
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
