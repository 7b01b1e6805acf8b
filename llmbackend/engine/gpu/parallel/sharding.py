"""A rank's part of a model, read from the model's files: whole heads and columns of what splits, all of what does not.

For: a rank, between loading a model and building its program. Does not know: processes, steps, how a product is
computed. Invariants: the parts of all ranks together are the model; every rank's program computes the same hidden
states, since after the two products of a layer whose inputs are split the ranks' results are summed; what cannot be
split evenly is refused by name; the whole model is in host memory only, and freed before the program is built.
Source: Megatron-LM's split of attention and MLP (arXiv 1909.08053, §3).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from ... import lean_imports
from ...attention.interface import LayerShape
from ...config import EngineConfig
from ...errors import UnshardableError
from ...model.decoder_description import Attention, Decoder, Layer, Mlp, Norm, Projection
from ...model.loader import LoadedModel, load_model
from ..weights import DenseWeight, DeviceWeight, Matmul, QuantizedLinear, SplittableWeight, check_device
from .collectives import Collectives, ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class SummedWeight:
    """This rank's input columns of a matrix: the product is the sum of all ranks' products."""

    local: DeviceWeight
    ranks: Collectives

    @property
    def n(self) -> int:
        return self.local.n

    @property
    def k(self) -> int:
        """The number of this rank's columns."""
        return self.local.k

    def multiply(self, matmul: Matmul, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self.local.multiply(matmul, x, None, out)
        self.ranks.all_reduce(out)
        if bias is not None:
            out += bias


@dataclass(frozen=True, slots=True, eq=False)
class GatheredWeight:
    """This rank's output rows of a matrix, the last rank's padded with zeros: the product is all ranks' products side
    by side."""

    local: DeviceWeight
    ranks: Collectives
    n: int

    @property
    def k(self) -> int:
        return self.local.k

    def multiply(self, matmul: Matmul, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        part = out.new_empty((len(x), self.local.n))
        self.local.multiply(matmul, x, None, part)
        parts = self.ranks.all_gather(part)
        out.copy_(parts.transpose(0, 1).flatten(1)[:, : self.n])
        if bias is not None:
            out += bias


class Sharding:
    """The part of rank `ranks.rank`. Weights are copied to `device`, so that the whole model can be freed."""

    def __init__(self, ranks: Collectives, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def layer_shapes(self, shapes: Mapping[nn.Module, LayerShape]) -> dict[nn.Module, LayerShape]:
        """The KV shapes of this rank. Raises UnshardableError."""
        return {
            module: replace(shape, num_kv_heads=len(self._kv_heads(shape.num_kv_heads)))
            for module, shape in shapes.items()
        }

    def decoder(self, decoder: Decoder, shapes: Mapping[nn.Module, LayerShape]) -> Decoder:
        """shapes: of the whole model. Raises UnshardableError."""
        embedding = decoder.embedding.to(self._device)
        return replace(
            decoder,
            embedding=embedding,
            layers=tuple(self._layer(layer, shapes[layer.module]) for layer in decoder.layers),
            norm=replace(decoder.norm, weight=decoder.norm.weight.to(self._device)),
            head=self._head(decoder, embedding),
        )

    def _layer(self, layer: Layer, shape: LayerShape) -> Layer:
        return replace(
            layer,
            attention_norm=self._norm(layer.attention_norm),
            attention=self._attention(layer.attention, shape),
            attention_out_norm=self._norm(layer.attention_out_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp=self._mlp(layer.mlp),
            mlp_out_norm=self._norm(layer.mlp_out_norm),
        )

    def _attention(self, attention: Attention, shape: LayerShape) -> Attention:
        if attention.norm_whole:
            raise UnshardableError(self._refusal("it norms queries and keys over all heads together"))
        head_dim = shape.key_dim
        heads = self._part(attention.out.weight.k // head_dim, "attention heads")
        kv_heads = self._kv_heads(shape.num_kv_heads)
        num_heads = attention.out.weight.k // head_dim
        rows = torch.cat(
            [
                _heads(heads, head_dim),
                _heads(kv_heads, head_dim) + num_heads * head_dim,
                _heads(kv_heads, head_dim) + (num_heads + shape.num_kv_heads) * head_dim,
            ]
        )
        sinks = attention.options.sinks
        return replace(
            attention,
            qkv=self._rows(attention.qkv, rows),
            out=self._columns(attention.out, range(heads.start * head_dim, heads.stop * head_dim)),
            q_norm=self._norm(attention.q_norm),
            k_norm=self._norm(attention.k_norm),
            cos_sin=None if attention.cos_sin is None else attention.cos_sin.to(self._device),
            options=replace(
                attention.options,
                sinks=None if sinks is None else sinks.detach()[heads.start : heads.stop].to(self._device),
            ),
        )

    def _mlp(self, mlp: Mlp) -> Mlp:
        """gate and up side by side, as programs need them."""
        part = self._part(mlp.gate.weight.n, "columns of its MLP")
        rows = torch.arange(part.start, part.stop)
        both = _splittable(mlp.gate).rows(rows).above(_splittable(mlp.up).rows(rows)).to(self._device)
        return replace(
            mlp,
            gate=Projection(both.part(0, len(part)), self._bias(mlp.gate, part)),
            up=Projection(both.part(len(part), len(part)), self._bias(mlp.up, part)),
            down=self._columns(mlp.down, part),
        )

    def _head(self, decoder: Decoder, embedding: torch.Tensor) -> Projection:
        """A head that is tied to the embedding is a part of the embedding on the device, too."""
        vocab_size, weight = decoder.head.weight.n, _dense(decoder.head)
        width = -(-vocab_size // self._ranks.size)
        part = range(self._ranks.rank * width, (self._ranks.rank + 1) * width)
        is_tied = weight.data_ptr() == decoder.embedding.data_ptr() and weight.shape == decoder.embedding.shape
        local = (embedding if is_tied else weight)[part.start : part.stop].to(self._device)
        if len(local) < width:
            local = nn.functional.pad(local, (0, 0, 0, width - len(local)))
        bias = decoder.head.bias
        return Projection(
            GatheredWeight(DenseWeight(local.contiguous()), self._ranks, vocab_size),
            None if bias is None else bias.to(self._device),
        )

    def _rows(self, projection: Projection, rows: torch.Tensor) -> Projection:
        weight, bias = _splittable(projection).rows(rows), projection.bias
        return Projection(weight.to(self._device), None if bias is None else bias[rows].to(self._device))

    def _columns(self, projection: Projection, columns: range) -> Projection:
        local = _splittable(projection).columns(columns).to(self._device)
        bias = projection.bias
        return Projection(SummedWeight(local, self._ranks), None if bias is None else bias.to(self._device))

    def _bias(self, projection: Projection, part: range) -> torch.Tensor | None:
        return None if projection.bias is None else projection.bias[part.start : part.stop].to(self._device)

    def _norm(self, norm: Norm | None) -> Norm | None:
        return None if norm is None else replace(norm, weight=norm.weight.to(self._device))

    def _part(self, count: int, what: str) -> range:
        if count % self._ranks.size:
            raise UnshardableError(self._refusal(f"it has {count} {what}"))
        width = count // self._ranks.size
        return range(self._ranks.rank * width, (self._ranks.rank + 1) * width)

    def _kv_heads(self, count: int) -> range:
        """Where there are fewer KV heads than ranks, neighbouring ranks hold the same one."""
        if count >= self._ranks.size or self._ranks.size % count:
            return self._part(count, "KV heads")
        head = self._ranks.rank * count // self._ranks.size
        return range(head, head + 1)

    def _refusal(self, why: str) -> str:
        return f"engine argument 'tensor_parallel_size' is {self._ranks.size}, which the model does not allow: {why}"


def _heads(heads: range, head_dim: int) -> torch.Tensor:
    return torch.arange(heads.start * head_dim, heads.stop * head_dim)


def _splittable(projection: Projection) -> Any:
    """A SplittableWeight; Any, because gate and up are of the same kind, which their types do not say."""
    assert isinstance(projection.weight, SplittableWeight), "a model that was loaded for programs has such weights"
    return projection.weight


def _dense(projection: Projection) -> torch.Tensor:
    assert isinstance(projection.weight, DenseWeight), "a head is never quantised"
    return projection.weight.tensor


def _device_of(config: EngineConfig, rank: int) -> torch.device:
    first = torch.device(config.device)
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


def refusal(config: EngineConfig, why: str) -> ValueError:
    size = config.tensor_parallel_size
    return ValueError(f"engine argument 'tensor_parallel_size' is {size}, which the model does not allow: {why}")


def load_part(config: EngineConfig, ranks: ProcessGroup) -> LoadedModel:
    """Raises ValueError or OSError with a text for the user, and torch.OutOfMemoryError."""
    device = _device_of(config, ranks.rank)
    loaded = _load(config, device)
    if loaded.decoder is None:
        raise refusal(config, loaded.why_modules)
    sharding, checked = Sharding(ranks, device), loaded.checked
    part = dataclasses.replace(
        loaded,
        decoder=sharding.decoder(loaded.decoder, loaded.layer_shapes),
        layer_shapes=sharding.layer_shapes(loaded.layer_shapes),
        device=device,
        checked=dataclasses.replace(
            checked,
            sequences=tuple(sequence.to(device) for sequence in checked.sequences),
            logits=checked.logits.to(device),
        ),
    )
    _drop_weights(loaded.model)
    return part


def _load(config: EngineConfig, device: torch.device) -> LoadedModel:
    """The whole model, in host memory."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine argument 'tensor_parallel_size' is {config.tensor_parallel_size}, from device '{config.device}' "
            f"on, but this torch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA devices"
        )
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.num_threads or max(cores // config.tensor_parallel_size, 1))
    lean = lean_imports.without_compiler() if device.type == "cpu" else contextlib.nullcontext()
    with lean:
        loaded = load_model(msgspec.structs.replace(config, device="cpu"), dense=True)
    if config.quantization is not None:
        check_device(config.quantization, device, loaded.dtype)
    return loaded


def _drop_weights(model: nn.Module) -> None:
    """Frees the weights of the whole model. From now on its modules are only the keys of the layers' KV memory."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            del module.quantized
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
