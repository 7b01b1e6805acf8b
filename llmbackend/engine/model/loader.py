"""From a checkpoint to a model that can run flattened batches.

Used by the model runner. Independent of KV memory, rows and steps. Invariants: only safetensors or GGUF; no remote code
unless the config allows it; a loaded model has passed `compatibility`.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ..attention import interface
from ..attention.interface import AttentionOptions, LayerShape
from ..config import EngineConfig
from ..cpu.linear import StoredMatrices, pack_linears, swap_linears
from ..cpu.native_runner import why_modules
from ..cpu_threads import engine_threads
from ..errors import CheckpointError, ProgramUnsupportedError
from ..gpu.device import check_gpu
from ..gpu.weights.dense import check_device, join_neighbours, quantize_linears
from ..kernels.choice import Choice, choose_library
from ..kernels.library import NativeKernels
from ..kernels.operations import Type
from ..kernels.weights import TYPE_OF, NewMemory, WeightStore
from ..load_progress import bar_hook, part, report
from .checkpoint_check import (
    PLAIN_UNDER_A_LABEL,
    check_loading_info,
    check_tensors,
    note_plain_weights,
    note_unused_scales,
    without_report,
)
from .checkpoint_files import TensorHeader, are_gguf, bad_checkpoint, check_directory, read_headers
from .compatibility import (
    CheckedModel,
    architecture_name,
    auto_class,
    causal_lm_class,
    check_calls,
    check_config,
    check_model,
    checked_length,
    is_recurrent,
    needs_program,
)
from .decoder_description import Decoder, why_not_on_accelerator
from .gguf_model import KeptLayers, fill_of_gguf
from .hybrid_description import check_layers, describe_any
from .int4_formats import METHODS, PackedFormat, packed_format
from .int4_model import Int4Placement, fill
from .kept_matrices import kept_matrices
from .latent_attention import headed_linears
from .located_files import files_of
from .lora import LoraBatch, ModuleAdapters, wrap_linears
from .module_names import module_tensors, own_names, reported_names
from .native_experts import ExpertsToPack, kept_names
from .rotary import fix_frequencies
from .text_part import keep_text

logger = logging.getLogger(__name__)

_DEQUANTIZED = ("fp8",)  # quant_methods whose weights transformers dequantizes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that has passed `compatibility`, and how it can be computed."""

    model: Any
    layer_shapes: Mapping[nn.Module, LayerShape]
    """KV shape by attention module, in layer order."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    """In tokens."""
    eos_token_ids: tuple[int, ...]
    model_type: str
    linear_kind: str
    """How linear layers compute, for the log."""
    checked: CheckedModel
    decoder: Decoder | None
    """What a program would compute; None = the model runs as modules."""
    why_modules: str
    """Why there is no decoder; empty if there is one."""
    kernels: NativeKernels | None = None
    """The native kernels, if they compute the linear layers."""
    store: WeightStore | None = None
    """The memory of the packed weights, if the native kernels compute them."""
    adapters: ModuleAdapters | None = None
    """None until `with_module_adapters`."""

    @property
    def weight_bytes(self) -> int:
        """Of the modules' tensors and the packed weights, in the device's memory."""
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())}
        tensors.pop(0, None)  # freed when it was packed
        packed = 0 if self.store is None else self.store.used.nbytes
        return int(sum(tensors.values()) + packed)


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint that passed the checks made before its weights are read."""

    hf_config: Any
    tensors: Mapping[str, TensorHeader] | None
    """By name; None = a hub id, or random weights."""
    max_model_len: int
    device: torch.device
    dense: bool
    """Whether weights stay plain matrices."""
    int4: PackedFormat | None = None
    """How the checkpoint stores 4-bit weights; hf_config no longer mentions them."""
    is_gguf: bool = False

    @property
    def is_multimodal(self) -> bool:
        return self.hf_config.get_text_config(decoder=True) is not self.hf_config


def open_checkpoint(config: EngineConfig, dense: bool | None = None) -> OpenedCheckpoint:
    """dense: None = if the device is not a CPU. Raises ValueError (naming the argument or the architecture) or OSError
    (missing or unreadable files)."""
    interface.register()
    device = device_of(config.device)
    dense = device.type != "cpu" if dense is None else dense
    tensors = _read_directory(config)
    note_unused_scales(config.kv_cache_dtype, tensors or ())
    hf_config = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    check_config(hf_config)
    if (reason := why_modules(config)) and is_recurrent(hf_config):
        raise needs_program(hf_config, reason)
    int4 = _check_quantization(config, hf_config, dense)
    max_len = checked_length(hf_config, config.given_max_model_len)
    is_gguf = tensors is not None and are_gguf(files_of(config))
    return OpenedCheckpoint(hf_config, tensors, max_len, device, dense, int4, is_gguf)


def load_model(config: EngineConfig, dense: bool | None = None, new_memory: NewMemory | None = None) -> LoadedModel:
    """dense: whether weights stay plain matrices, for a program on an accelerator; None = if the device is not a CPU.
    new_memory: for packed weights; None = memory of this process.
    Raises ValueError (naming the argument or the architecture) or OSError (missing or unreadable files).
    """
    opened = open_checkpoint(config, dense)
    device, dense, hf_config, max_len = opened.device, opened.dense, opened.hf_config, opened.max_model_len
    if is_recurrent(hf_config):
        check_layers(random_model(config, hf_config, torch.float32, torch.device("meta")))
    with part("read checkpoint"):
        if config.load_format == "dummy" or (opened.int4 is None and not opened.is_gguf):
            model, stored = _instantiate(config, opened), None
        else:
            model, stored = _filled_model(config, opened)
    keep_text(model)
    fix_frequencies(model, max_len)
    dtype = next(model.parameters()).dtype
    if not isinstance(model.get_output_embeddings(), nn.Module):
        raise ValueError(f"model architecture '{architecture_name(hf_config)}' is not supported: it has no output head")
    rounds_weights = config.quantization is not None and not dense and stored is None
    if rounds_weights:  # check the model itself before its weights are rounded
        checked = replace(_check(model.eval(), on_one_thread=False), quantization=config.quantization)
    with part("pack"):
        model, kernels, store, linear_kind = _place(config, model, device, dtype, dense, new_memory, stored)
    if not rounds_weights:
        checked = _check(model, kernels is not None, config.quantization)
    elif config.quantization == "int4":  # too far from the original model to tell a wrong program from a right one
        checked = replace(checked, logits=check_calls(model)[2])
    if dense or (kernels is not None and not config.enforce_eager):
        decoder, why_modules = describe_or_why(model, checked.options, max_len, for_accelerator=dense)
    else:
        decoder, why_modules = None, "enforce_eager is set" if kernels else why_not_native(config, dtype)
    return LoadedModel(
        model=model,
        layer_shapes=checked.shapes,
        dtype=dtype,
        device=device,
        vocab_size=int(hf_config.get_text_config(decoder=True).vocab_size),
        max_model_len=max_len,
        eos_token_ids=eos_token_ids(model, hf_config),
        model_type=str(hf_config.model_type),
        linear_kind=linear_kind,
        checked=checked,
        kernels=kernels,
        store=store,
        decoder=decoder,
        why_modules=why_modules,
    )


def _check(model: Any, on_one_thread: bool, quantization: str | None = None) -> CheckedModel:
    report("checking the model")
    with part("check"), _on_one_thread() if on_one_thread else contextlib.nullcontext():
        return check_model(model, quantization)


@contextlib.contextmanager
def _on_one_thread() -> Iterator[None]:
    """Runs torch on one thread. A step of few tokens, whose linear layers run on the native kernels' threads, takes a
    fifth of the time without torch's own threads, which spin while waiting for work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def with_module_adapters(config: EngineConfig, loaded: LoadedModel) -> LoadedModel:
    """For a model that runs as modules: adds adapters if the config enables them. Raises ValueError naming adapter,
    file and reason."""
    if not config.enable_lora:
        return loaded
    batch = LoraBatch(config.max_num_seqs, loaded.device)
    wrapped = wrap_linears(loaded.model, batch)

    def place(linears: nn.ModuleList) -> nn.ModuleList:
        if loaded.device.type != "cpu":
            return linears.to(loaded.device)
        plain = msgspec.structs.replace(config, quantization=None)
        _swap_linears(plain, linears, loaded.dtype, loaded.kernels)
        return linears

    return replace(loaded, adapters=ModuleAdapters(config, wrapped, batch, loaded.dtype, place))


def _place(
    config: EngineConfig,
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    dense: bool,
    new_memory: NewMemory | None,
    stored: StoredMatrices | None,
) -> tuple[Any, NativeKernels | None, WeightStore | None, str]:
    """The model on its device with the linear layers for it; the native kernels and the memory of their packed weights,
    if they compute these; how linear layers compute, for the log."""
    if dense and (eight_bits := config.eight_bits) is not None:
        check_device(eight_bits, device, dtype)
        quantize_linears(model, model.get_output_embeddings(), eight_bits, device)
    if device.type != "cpu":  # matrices kept as stored have no tensor to copy
        model = model.to(device)
    model = model.eval()
    if dense:
        join_neighbours(model)
        return model, None, None, f"torch {config.quantization}" if config.quantization else "torch"
    kernels = _native_kernels(config, device, dtype)
    return model, kernels, *_swap_linears(config, model, dtype, kernels, new_memory, stored)


def _native_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> NativeKernels | None:
    """The native kernels, if they can compute this model's layers. Raises ValueError as `library_choice` does."""
    choice = library_choice(config, dtype) if device.type == "cpu" else None
    return None if choice is None else NativeKernels(choice.library, engine_threads(config))


def library_choice(config: EngineConfig, dtype: torch.dtype) -> Choice | None:
    """The native kernels to use on CPU, and why; None = torch computes. Raises ValueError if quantised weights need
    them."""
    choice = None
    if dtype in TYPE_OF and config.kernels != "torch":
        choice = choose_library(TYPE_OF[dtype] if config.quantization is None else Type.INT8)
    if choice is None and config.quantization is not None:
        raise ValueError(
            f"engine argument 'quantization' is '{config.quantization}', which needs the native CPU kernels"
        )
    return choice


def why_not_native(config: EngineConfig, dtype: torch.dtype) -> str:
    if config.kernels == "torch":
        return "kernels is 'torch'"
    if dtype not in TYPE_OF:
        kinds = " and ".join(str(kind).removeprefix("torch.") for kind in TYPE_OF)
        return f"the native CPU kernels support {kinds}, not {str(dtype).removeprefix('torch.')}"
    return "the native CPU kernels are not built"


def _check_quantization(config: EngineConfig, hf_config: Any, dense: bool) -> PackedFormat | None:
    """Raises ValueError for weights in a format that neither path supports. Lets transformers dequantise the formats it
    can, and hides from it 4-bit weights, which this loader reads."""
    if config.quantization == "fp8" and config.batch_invariant:  # torch's library multiplies; int8 products are exact
        raise ValueError(
            "engine argument 'quantization' is 'fp8', expected 'int8' or null where 'batch_invariant' is true"
        )
    if config.quantization == "fp8" and not dense:
        raise ValueError("engine argument 'quantization' is 'fp8', expected 'int8', 'int4' or null on device 'cpu'")
    stored = getattr(hf_config, "quantization_config", None)
    if stored is None:
        return None
    settings = stored if isinstance(stored, dict) else vars(stored)
    try:
        int4 = packed_format(settings)
    except CheckpointError as error:
        raise bad_checkpoint(config.model, error) from None
    if int4 is not None:
        if dense and config.quantization is not None:
            raise ValueError(
                f"engine argument 'quantization' is '{config.quantization}', expected null for '{config.model}', whose "
                "weights are in 4 bits"
            )
        del hf_config.quantization_config
        return int4
    method = str(settings.get("quant_method"))
    if method not in _DEQUANTIZED:
        raise ValueError(
            f"engine argument 'model' is '{config.model}', whose weights are quantised by '{method}', expected "
            f"unquantised ones, or {', '.join((*_DEQUANTIZED, *METHODS))}: the engine argument 'quantization' "
            "quantises unquantised ones"
        )
    settings["dequantize"] = True
    return None


def _swap_linears(
    config: EngineConfig,
    model: Any,
    dtype: torch.dtype,
    kernels: NativeKernels | None,
    new_memory: NewMemory | None = None,
    stored: StoredMatrices | None = None,
) -> tuple[WeightStore | None, str]:
    """Replaces linear layers by packed ones. Returns the memory of native ones, and how they compute, for the log."""
    if kernels is None:
        return None, pack_linears(model, dtype)
    kind = config.quantization or str(dtype).removeprefix("torch.")
    experts = ExpertsToPack(model, config.quantization, stored)
    store = swap_linears(model, kernels, config.quantization, new_memory, stored, experts, headed_linears(model))
    return store, f"{kernels.library.variant} {kind}"


def describe_or_why(
    model: Any, options: Mapping[nn.Module, AttentionOptions], max_model_len: int, for_accelerator: bool = False
) -> tuple[Decoder | None, str]:
    """The model's description, or why there is none."""
    try:
        decoder = describe_any(model, options, max_model_len, with_experts=for_accelerator)
    except ProgramUnsupportedError as error:
        return None, str(error)
    reason = why_not_on_accelerator(decoder) if for_accelerator else ""
    return None if reason else decoder, reason


def device_of(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"engine argument 'device' is '{name}', expected 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine argument 'device' is '{name}', expected 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        check_gpu(device)
    return device


def _read_directory(config: EngineConfig) -> dict[str, TensorHeader] | None:
    """The tensors of a local checkpoint, checked before transformers builds anything from its config.json."""
    if config.load_format == "dummy" or not Path(config.model).is_dir():
        return None
    try:
        return check_directory(Path(config.model))
    except CheckpointError as error:
        raise bad_checkpoint(config.model, error) from None


def _instantiate(config: EngineConfig, opened: OpenedCheckpoint) -> Any:
    """With random weights, or those that transformers reads."""
    hf_config = opened.hf_config
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    if config.load_format == "dummy":
        return random_model(config, hf_config, dtype, opened.device)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_tqdm_hook(bar_hook)
    note_plain_weights(hf_config, stored_tensors(config, opened, files_of(config)))
    try:
        with without_report():
            model, info = auto_class(hf_config).from_pretrained(
                config.model,
                config=hf_config,
                dtype=dtype,
                attn_implementation=interface.PAGED_ATTENTION,
                use_safetensors=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
        check_loading_info(info, hf_config, opened.is_multimodal)
    except (CheckpointError, SafetensorError) as error:
        raise bad_checkpoint(config.model, error) from error
    return model


def _filled_model(config: EngineConfig, opened: OpenedCheckpoint) -> tuple[Any, StoredMatrices | None]:
    """For weights in 4 bits or in a GGUF file, which transformers does not read. Also the matrices kept as stored."""
    dtype, files = dtype_of(config, opened), files_of(config)
    tensors = stored_tensors(config, opened, files)
    model = random_model(config, opened.hf_config, dtype, torch.device("meta"))
    try:
        if opened.int4 is None:
            kept: StoredMatrices | None = KeptLayers(files) if config.quantization == "int4" else None
            fill_of_gguf(model, files, dtype, kept)
        else:
            if opened.int4.plain(tensors).keys() == tensors.keys():
                logger.warning(PLAIN_UNDER_A_LABEL)
            named = module_tensors(files, model)
            keep_text(model)
            kept = kept_matrices(config, opened.int4, named)
            place = Int4Placement(opened.device, dtype, dense=not opened.dense, exact=config.batch_invariant)
            fill(model, opened.int4, named, place, frozenset() if kept is None else kept_names(model, kept))
    except (CheckpointError, SafetensorError) as error:
        raise bad_checkpoint(config.model, error) from error
    with contextlib.suppress(OSError):  # it has none
        model.generation_config = GenerationConfig.from_pretrained(config.model)
    return model, kept


def stored_tensors(config: EngineConfig, opened: OpenedCheckpoint, files: Sequence[Path]) -> Mapping[str, TensorHeader]:
    """The tensors of the files. Raises ValueError if they do not fit the model."""
    try:
        tensors = read_headers(files) if opened.tensors is None else opened.tensors
        plain, spare = tensors, frozenset[str]()
        if opened.int4 is not None:
            model = random_model(config, opened.hf_config, torch.float32, torch.device("meta"))
            spare = reported_names(opened.int4.spare(tensors), model)
            plain = own_names(opened.int4.plain(tensors), model)
        check_tensors(*class_and_config(config, opened.hf_config), plain, opened.is_multimodal, spare)
    except CheckpointError as error:
        raise bad_checkpoint(config.model, error) from error
    return tensors


def dtype_of(config: EngineConfig, opened: OpenedCheckpoint) -> torch.dtype:
    """As transformers chooses it: the config's, else that of the checkpoint's first floating-point tensor. But kept
    4-bit weights are multiplied by native kernels, which do not support float16."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    dtype = _stated_dtype(opened)
    keeps_four_bits = opened.int4 is not None and config.quantization == "int4"
    return torch.bfloat16 if keeps_four_bits and dtype == torch.float16 else dtype


def _stated_dtype(opened: OpenedCheckpoint) -> torch.dtype:
    stated = getattr(opened.hf_config, "dtype", None) or getattr(opened.hf_config.get_text_config(), "dtype", None)
    if stated is not None:
        return stated if isinstance(stated, torch.dtype) else getattr(torch, str(stated))
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    found = (names.get(tensor.dtype) for tensor in (opened.tensors or {}).values())
    return next((dtype for dtype in found if dtype is not None), torch.float32)


def class_and_config(config: EngineConfig, hf_config: Any) -> tuple[Any, Any]:
    """The class that AutoModelForCausalLM will choose, and the config that it will receive."""
    model_class = causal_lm_class(hf_config)
    if model_class is None or "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {}):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
        return type(model), model.config
    text_class = hf_config.sub_configs.get("text_config")
    if text_class is not None and model_class.config_class == text_class:
        text_config = hf_config.get_text_config()
        if (quantization := getattr(hf_config, "quantization_config", None)) is not None:
            text_config.quantization_config = quantization
        return model_class, text_config
    return model_class, hf_config


def random_model(config: EngineConfig, hf_config: Any, dtype: torch.dtype | str, device: torch.device) -> Any:
    """Random weights, generated on the device itself: a GPU takes a second for billions of numbers, a CPU minutes."""
    if isinstance(dtype, str):
        dtype = getattr(hf_config, "dtype", None) or torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(config.seed)
        return auto_class(hf_config).from_config(
            copy.deepcopy(hf_config),  # it notes the dtype in the config
            dtype=dtype,
            attn_implementation=interface.PAGED_ATTENTION,
            trust_remote_code=config.trust_remote_code,
        )


def eos_token_ids(model: Any, hf_config: Any) -> tuple[int, ...]:
    """generation_config.json takes precedence over config.json, as in transformers' generate."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if given is None:
        given = getattr(hf_config.get_text_config(decoder=True), "eos_token_id", None)
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (int(given),)
