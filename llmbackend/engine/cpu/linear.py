"""Linear layers with packed weights for the CPU: on the native kernels, or on oneDNN if those are not available.

The loader swaps them for a model's own layers; the program reads the native packed weights. Invariant: a row of the
output depends, bit by bit, only on that row of the input. oneDNN's packed kernels treat rows alike only from two rows
up, so a single row is computed as two; plain `F.linear` changes kernels, and results, with the number of rows.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..kernels.library import FOUR_BITS, NativeKernels, op_pointers
from ..kernels.operations import Epilogue, Kind, LinearOp, Rows, Step, Type
from ..kernels.weights import NEIGHBOURS, TYPE_OF, FourBits, NewMemory, PackedWeight, StoredBlocks, WeightStore
from ..load_progress import counted
from .native_memory import release_pages

logger = logging.getLogger(__name__)

_ROUNDED: Final = (Type.FLOAT32, Type.BFLOAT16, Type.INT8, Type.INT4_MIN)
"""Types to which plain matrices are packed."""


class NativeLinear(nn.Module):
    """y = x·Wᵀ + b for x [..., in_features] in the model's dtype, float32 or bfloat16."""

    def __init__(
        self, kernels: NativeKernels, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.k, packed.n
        self.packed = packed
        self.float_bias = None if bias is None else bias.detach().float().contiguous()
        # Some models read the weight's dtype; computing with this tensor is an error.
        self.weight = torch.empty((packed.n, packed.k), dtype=dtype, device="meta")
        self._kernels = kernels
        self._op = LinearOp(
            kind=Kind.LINEAR,
            rows=Rows.TOKENS,
            weight=packed.address,
            scale=packed.scale or None,
            sums=packed.sums or None,
            order=packed.order or None,
            bias=None if self.float_bias is None else self.float_bias.data_ptr(),
            n=packed.n,
            k=packed.k,
            x_stride=packed.k,
            y_stride=packed.n,
            weight_type=packed.type,
            epilogue=Epilogue.STORE,
            factor=1.0,
        )
        self._pointers = op_pointers([self._op])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y = rows.new_empty((rows.shape[0], self.out_features))
        op = self._op
        op.x, op.x_type, op.y, op.y_type = rows.data_ptr(), TYPE_OF[rows.dtype], y.data_ptr(), TYPE_OF[y.dtype]
        self._kernels.run(self._pointers, 1, Step(num_tokens=rows.shape[0]))
        return y.view(*x.shape[:-1], self.out_features)


class HeadRows(NamedTuple):
    """How the outputs of a linear layer are divided into heads."""

    rest: int
    """The first outputs of a head, by which a program also multiplies transposed."""
    value: int
    """The other outputs."""


class HeadedLinear(NativeLinear):
    """A linear layer whose outputs are heads. Each head has a second matrix: the transpose of its `rest` rows."""

    def __init__(
        self, kernels: NativeKernels, packed: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype,
        up: PackedWeight,
    ) -> None:  # fmt: skip
        """up: [k, rest] of the first head; the others follow at constant strides"""
        super().__init__(kernels, packed, bias, dtype)
        self.up = up


def swap_linears(
    model: Any,
    kernels: NativeKernels,
    quantization: str | None,
    new_memory: NewMemory | None = None,
    stored: StoredMatrices | None = None,
    experts: PackableExperts | None = None,
    headed: Mapping[str, HeadRows] | None = None,
) -> WeightStore:
    """Packs and replaces every plain linear layer of a float32 or bfloat16 model in place. Returns the memory of the
    packed weights, which has space for the model's norms and biases.

    quantization "int8": all these weights become int8, including the output head; "int4": the head and values that
    several queries share become int8, the others 4 bits (accuracy: benchmarks/perplexity.py). stored: matrices that
    int4 keeps as stored in the checkpoint, including the head; all others become int8. experts: packed after the linear
    layers. headed: the layers, by name, that become a HeadedLinear; if the layer itself is kept as stored, its
    transposed matrices become int8.
    """
    found, headed = dict(_plain_linears(model)), headed or {}
    matrices = {path: _matrix(linear) for path, linear in found.items()}
    if quantization == "int4":
        types = _types_of_int4(found, model.get_output_embeddings(), stored)
    else:
        types = {path: TYPE_OF[each.dtype] if quantization is None else Type.INT8 for path, each in matrices.items()}
    if stored is not None:
        counts = Counter("int8" if kind is Type.INT8 else f"kept {kind.name}" for kind in types.values())
        logger.info("linear layers: %s", ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    shapes = [(*matrix.shape, types[path]) for path, matrix in matrices.items()]
    for path, heads in headed.items():
        n, k = matrices[path].shape
        shapes += [(k, heads.rest, _up_type(types[path]))] * (n // sum(heads))
    extra_bytes = _vector_bytes(model) + _order_bytes(found, stored)
    if experts is not None:
        shapes, extra_bytes = shapes + experts.shapes, extra_bytes + experts.vector_bytes
    store = WeightStore(kernels, shapes, extra_bytes, new_memory)
    shared = _shared_addresses(model)
    for path, linear in counted("packing weights", list(found.items())):
        matrix, head_rows = matrices[path], headed.get(path)
        if stored is not None and types[path] is not Type.INT8:
            kept = stored.read(path)
            packed = pack_stored(store, kept, types[path])
            if head_rows is not None:
                matrix = _values(kept, kernels)
        else:
            packed = store.pack(matrix, types[path])
        made = (kernels, packed, linear.bias, matrices[path].dtype)
        if head_rows is None:
            _replace(model, path, NativeLinear(*made))
        else:
            _replace(model, path, HeadedLinear(*made, _pack_ups(store, matrix, head_rows, types[path])[0]))
        if not linear.weight.is_meta and linear.weight.data_ptr() not in shared:
            release_pages(linear.weight.data_ptr(), linear.weight.nbytes)
    if experts is not None:
        experts.pack(store, kernels)
    return store


def _up_type(kind: Type) -> Type:
    return kind if kind in _ROUNDED else Type.INT8


def _pack_ups(store: WeightStore, matrix: torch.Tensor, heads: HeadRows, kind: Type) -> list[PackedWeight]:
    by_head = matrix.view(-1, sum(heads), matrix.shape[1])[:, : heads.rest]
    return [store.pack(head.t(), _up_type(kind)) for head in by_head]


def _values(matrix: FourBits | StoredBlocks, kernels: NativeKernels) -> torch.Tensor:
    if isinstance(matrix, FourBits):
        return torch.from_numpy(matrix.values())
    return torch.from_numpy(kernels.library.unpack_blocks(matrix.type, matrix.blocks))


def pack_stored(store: WeightStore, matrix: FourBits | StoredBlocks, kind: Type) -> PackedWeight:
    return store.pack_blocks(matrix) if isinstance(matrix, StoredBlocks) else store.pack_four_bits(matrix, kind)


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


class PackableExperts(Protocol):
    """Further parts of a model to pack."""

    @property
    def shapes(self) -> list[tuple[int, int, Type]]:
        """(n, k, type) of all matrices, in packing order."""

    @property
    def vector_bytes(self) -> int:
        """Bytes for their small arrays."""

    def pack(self, store: WeightStore, kernels: NativeKernels) -> None:
        """Replaces modules of the model."""


class StoredMatrices(Protocol):
    """The quantized linear layers of a checkpoint, by their names in the model."""

    def type_of(self, layer: str) -> Type | None:
        """The type to keep; None = the layer is packed like any other."""

    def order_of(self, layer: str) -> bytes:
        """FourBits.order as bytes; b"" = it has none, or is not kept."""

    def read(self, layer: str) -> FourBits | StoredBlocks: ...


def _types_of_int4(found: Mapping[str, Any], head: Any, stored: StoredMatrices | None) -> dict[str, Type]:
    """A gate and its up projection, which are multiplied together, share one type and one input permutation."""
    if stored is None:
        eight_bits = {path for path, linear in found.items() if linear is head or _are_shared_values(path, found)}
        return {path: Type.INT8 if path in eight_bits else Type.INT4_MIN for path in found}
    types = {path: stored.type_of(path) or Type.INT8 for path in found}
    for path in found:
        parent, _, name = path.rpartition(".")
        names = [f"{parent}.{each}" for group in NEIGHBOURS if name == group[0] for each in group]
        together = [each for each in names if each in types]
        common = _common_type(together, types, stored)
        if common is not None or name == "gate_proj":
            types |= dict.fromkeys(together, common or Type.INT8)
    return types


def _are_shared_values(path: str, found: Mapping[str, Any]) -> bool:
    """Small matrices whose rounding errors all the queries of a group get: in 4 bits they alone cost Gemma 3 270M a
    tenth of its perplexity."""
    parent, _, name = path.rpartition(".")
    queries = found.get(f"{parent}.q_proj")
    return name == "v_proj" and queries is not None and 2 * found[path].out_features <= queries.out_features


def _common_type(together: list[str], types: Mapping[str, Type], stored: StoredMatrices) -> Type | None:
    """None = they have no type in common, or need different input permutations."""
    kinds = {types[path] for path in together}
    orders = {stored.order_of(path) for path in together} if kinds <= set(FOUR_BITS) else {b""}
    return one_type(kinds) if len(orders) == 1 else None


def one_type(kinds: Set[Type | None]) -> Type | None:
    """The type that can represent all layers of these types; None = there is none."""
    if kinds == {Type.INT4, Type.INT4_ZERO}:
        return Type.INT4_ZERO
    return next(iter(kinds)) if len(kinds) == 1 else None


def kept_weights(model: Any, stored: StoredMatrices) -> frozenset[str]:
    """Names of the weights that `swap_linears` reads from the checkpoint itself. Works on models with or without
    memory."""
    types = _types_of_int4(dict(_plain_linears(model)), None, stored)
    return frozenset(f"{path}.weight" for path, kind in types.items() if kind is not Type.INT8)


def _order_bytes(found: Mapping[str, Any], stored: StoredMatrices | None) -> int:
    """Space for input permutations, each starting on a cache line."""
    orders = () if stored is None else map(stored.order_of, found)
    return sum(len(order) + 64 for order in orders if order)


def _vector_bytes(model: nn.Module) -> int:
    """Space for norms, biases, convolutions and the like as float32, each starting on a cache line. Norms without a
    weight get one. Convolutions may come with column factors."""
    modules = list(model.modules())
    convolutions = {id(each.weight) for each in modules if type(each) is nn.Conv1d}
    parameters = (parameter for module in modules for parameter in module.parameters(recurse=False))
    counted_ones = (each for each in parameters if each.dim() == 1 or id(each) in convolutions)
    stated = sum(4 * parameter.numel() + 64 for parameter in counted_ones)
    factors = (each for module in modules if hasattr(module, "conv1d") for each in module.buffers(recurse=False))
    stated += sum(4 * each.numel() + 64 for each in factors)
    is_plain = (not module._parameters for name, module in model.named_modules() if name.endswith("norm"))
    return stated + sum(is_plain) * (4 * _width(model) + 64)


def _width(model: Any) -> int:
    config = getattr(model, "config", None)
    return 0 if config is None else int(getattr(config.get_text_config(decoder=True), "hidden_size", 0))


def _plain_linears(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and layers. Exact types only: a subclass may compute something else."""
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear or type(module) is Conv1D:
            yield name, module


def _matrix(linear: Any) -> torch.Tensor:
    """The weight as [out_features, in_features]; Conv1D stores it transposed."""
    weight: torch.Tensor = linear.weight.detach()
    return weight.t() if type(linear) is Conv1D else weight


def _shared_addresses(model: nn.Module) -> set[int]:
    """Addresses of weights shared by several modules: tied embeddings are still read after they are packed."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            address = parameter.data_ptr()
            (shared if address in seen else seen).add(address)
    return shared


# The number of rows that oneDNN is told to pack for; any from 16 to 512 gave the same layout and speed.
_PACK_ROWS = 64


def has_native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of this type faster than float32 ones."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.cpu._is_amx_fp16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """y = x·Wᵀ + b for x [..., in_features] in the model's dtype.

    compute_dtype is the type of the packed weight and of the product. On CPUs without bfloat16 products, widening
    bfloat16 weights to float32 at load is exact and about three times as fast; outputs are rounded to x's type.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._compute_dtype = compute_dtype
        # As in NativeLinear.
        self.weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        widened = weight.detach().to(compute_dtype).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(widened, _PACK_ROWS)
        self._bias = None if bias is None else bias.detach().to(compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if count == 1:
            rows = rows.expand(2, -1).contiguous()
        wide = rows.to(self._compute_dtype)
        y = torch.ops.mkldnn._linear_pointwise(wide, self._packed, self._bias, "none", [], "")
        output: torch.Tensor = y[:count].to(x.dtype).view(*x.shape[:-1], self.out_features)
        return output


def pack_linears(model: nn.Module, dtype: torch.dtype) -> str:
    """Replaces every plain linear layer of the model in place. Returns a description of how they compute."""
    compute_dtype = dtype if has_native(dtype) else torch.float32
    if compute_dtype != dtype and not _fits(model, compute_dtype):
        compute_dtype = dtype
    if compute_dtype == torch.float16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch"
    for path, linear in list(_plain_linears(model)):
        _replace(model, path, PackedLinear(_matrix(linear), linear.bias, compute_dtype))
    return f"packed {str(compute_dtype).removeprefix('torch.')}"


def _fits(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the widened weights fit in half of the free memory."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    wanted = sum(weight.numel() for weight in weights) * dtype.itemsize
    return bool(wanted < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
