"""What computes steps on a device: kernels in Triton's language where it runs, else torch and the host.

For: whoever starts an engine there (start.py). Does not know: memory, graphs, steps. Invariant: nothing of Triton is
imported where it is not installed or not wanted.
"""

from __future__ import annotations

import importlib.util

from ..config import EngineConfig
from ..decoder_description import Decoder, UnrecognisedError
from ..loader import LoadedModel
from .dense_weights import Matmul
from .ops import Ops
from .program import library_matmul
from .sampling import DeviceSampling, HostSampling, Sampling
from .torch_ops import TorchOps


def choose(config: EngineConfig, loaded: LoadedModel, triton: bool | None = None) -> tuple[Ops, Matmul, Sampling]:
    """triton: whether its kernels run here; None: on CUDA devices, where it is installed. `kernels: torch` leaves the
    operations to torch, and sampling where it is: it is an ablation of the operations.

    Raises UnrecognisedError when the model must run as modules, ValueError naming an argument.
    """
    if loaded.decoder is None:
        raise UnrecognisedError(loaded.why_modules)
    if triton is None:
        triton = loaded.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    by_kernels = triton and config.kernels != "torch"
    _check_invariance(config, by_kernels)
    ops = _triton_ops(config, loaded, loaded.decoder) if by_kernels else TorchOps()
    return ops, _matmul(config), _sampling(config, loaded, triton)


def _check_invariance(config: EngineConfig, by_kernels: bool) -> None:
    if not config.batch_invariant:
        return
    if not by_kernels:
        raise ValueError("engine argument 'batch_invariant' is true, which needs a GPU, triton and its kernels")
    if config.quantization == "fp8":  # the library's products; those of whole numbers are exact in any order
        raise ValueError("engine argument 'quantization' is 'fp8', expected null or 'int8' with batch_invariant")
    if config.tensor_parallel_size > 1:  # the order of sums between devices is chosen by the size of what is summed
        size = config.tensor_parallel_size
        raise ValueError(f"engine argument 'tensor_parallel_size' is {size}, expected 1 with batch_invariant")


def _triton_ops(config: EngineConfig, loaded: LoadedModel, decoder: Decoder) -> Ops:
    from .kernels.paged_attention import PagedAttention
    from .triton_ops import TritonOps

    if config.block_size < 16 or config.block_size & (config.block_size - 1):
        raise ValueError(f"engine argument 'block_size' is {config.block_size}, expected a power of two from 16")
    head_dims = [loaded.layer_shapes[layer.module].key_dim for layer in decoder.layers]
    widths = [layer.attention.out.weight.k for layer in decoder.layers]
    attention = PagedAttention(
        loaded.device,
        num_heads=max(width // head_dim for width, head_dim in zip(widths, head_dims, strict=True)),
        head_dim=max(head_dims),
        max_num_seqs=config.max_num_seqs,
        max_seq_len=loaded.max_model_len,
        exact_chunks=config.batch_invariant,
    )
    return TritonOps(attention)


def _matmul(config: EngineConfig) -> Matmul:
    if not config.batch_invariant:
        return library_matmul
    from .kernels.invariant_matmul import invariant_matmul

    return invariant_matmul


def _sampling(config: EngineConfig, loaded: LoadedModel, triton: bool) -> Sampling:
    limits = config.max_num_seqs, loaded.vocab_size, loaded.eos_token_ids
    if not triton:
        return HostSampling(*limits)
    from .device_sampler import DeviceSampler

    return DeviceSampling(DeviceSampler(*limits, loaded.device))
