"""A decoder-only model as a flat list of native operations: one call computes a whole step.

For: the model runner on CPU, when the model was recognised (model/decoder_description.py). Does not know: families,
transformers, requests, sampling. Invariants: all buffers are made once, for the largest step; the residual stream is
float32 throughout; the operations of a layer are listed in the order in which they run; a program is used only after
it gave the probes' logits as the model's own modules give them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..attention.native import NativeLayerCache, native_caches
from ..config import EngineConfig
from ..errors import ProgramUnsupportedError
from ..kernels.abi import AttentionOp, EmbedOp, Epilogue, Kind, LinearOp, NormOp, RotaryOp, Rows, Step, Type
from ..kernels.library import NativeKernels, op_pointers
from ..kernels.weights import TYPE_OF, PackedWeight
from ..model.compatibility import MAX_PROBE_TOKENS
from ..model.decoder_description import Attention, Decoder, Layer, Mlp, Norm, Projection
from ..model.loader import LoadedModel
from ..step import FlatStep, Int32Array, RowTable, StepPlan, flatten

Float32Array = npt.NDArray[np.float32]

# Rows that are a multiple of 4 KiB apart would share the same few sets of the first cache.
_ROW_PADDING = 16
_ACTIVATIONS = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}


class _Buffer:
    """Rows of float32 or bfloat16 in native memory."""

    def __init__(self, kernels: NativeKernels, rows: int, width: int, kind: Type) -> None:
        self.stride = -(-width // 16) * 16 + _ROW_PADDING
        self.type = kind
        self._memory = kernels.library.memory(rows * self.stride * (4 if kind == Type.FLOAT32 else 2))
        self.address = int(self._memory.ctypes.data)

    def floats(self, rows: int, width: int) -> Float32Array:
        """The first rows of a float32 buffer."""
        return self._memory.view(np.float32).reshape(-1, self.stride)[:rows, :width]


class DecoderProgram:
    def __init__(
        self,
        kernels: NativeKernels,
        decoder: Decoder,
        caches: Mapping[nn.Module, NativeLayerCache],
        max_tokens: int,
        max_samples: int,
    ) -> None:
        """max_tokens and max_samples: the largest step. Raises MemoryError."""
        self._kernels = kernels
        self._decoder = decoder
        self._caches = caches
        self._vocab_size = decoder.head.weight.n
        # Where weights are widened to be multiplied, activations are kept in float32.
        rounded = kernels.library.multiplies_bfloat16 and decoder.embedding.dtype == torch.bfloat16
        self._activation = Type.BFLOAT16 if rounded else Type.FLOAT32
        self._max_tokens, self._max_samples = max_tokens, max_samples
        self._make_buffers(max_tokens, max_samples)
        self._kept: list[Any] = []
        """The tensors that operations point to."""
        self._ops: list[ctypes.Structure] = []
        self._add_operations()
        self._pointers = op_pointers(self._ops)
        self._head_pointers = op_pointers(self._ops[-2:])

    def forward(self, step: FlatStep, block_table: npt.NDArray[np.int32]) -> Float32Array:
        """Computes the step; logits float32 [samples, vocab], valid until the next call. Raises MemoryError.

        block_table int32 [rows, blocks]: of the step's rows, contiguous.
        """
        arrays = (
            step.token_ids, step.positions, step.slots, step.query_start, step.seq_lens, block_table,
            step.sampled_tokens,
        )  # fmt: skip
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        num_samples = len(step.sampled_tokens)
        if len(step.token_ids) > self._max_tokens or num_samples > self._max_samples:
            raise RuntimeError(f"a step of {len(step.token_ids)} tokens and {num_samples} samples has no room")
        native_step = Step(
            len(step.token_ids), len(step.rows), num_samples, block_table.shape[1],
            *(array.ctypes.data for array in arrays),
        )  # fmt: skip
        num_ops = len(self._ops) if num_samples else len(self._ops) - 2
        self._kernels.run(self._pointers, num_ops, native_step)
        return self._finished(self._logits.floats(num_samples, self._vocab_size))

    def logits_behind(self, step: FlatStep, tokens: Int32Array) -> Float32Array:
        """Logits float32 [tokens, vocab] behind these tokens of the batch, the one that was computed last; valid until
        the next call."""
        assert len(tokens) <= self._max_samples, "more tokens than fit into a step's samples"
        tokens = np.ascontiguousarray(tokens, np.int32)
        native_step = Step(num_tokens=len(step.token_ids), num_rows=len(step.rows), num_sampled=len(tokens),
                           sampled_tokens=tokens.ctypes.data)  # fmt: skip
        self._kernels.run(self._head_pointers, 2, native_step)
        return self._finished(self._logits.floats(len(tokens), self._vocab_size))

    def _finished(self, logits: Float32Array) -> Float32Array:
        decoder = self._decoder
        if decoder.logit_factor != 1.0:
            logits *= np.float32(decoder.logit_factor)
        if cap := decoder.logit_softcap:
            np.multiply(np.tanh(logits / np.float32(cap)), np.float32(cap), out=logits)
        return logits

    def _make_buffers(self, tokens: int, samples: int) -> None:
        layers = self._decoder.layers
        self._width = self._decoder.embedding.shape[1]
        qkv = max(layer.attention.qkv.weight.n for layer in layers)
        attended = max(layer.attention.out.weight.k for layer in layers)
        gated = max(layer.mlp.gate.weight.n for layer in layers)
        self._hidden = _Buffer(self._kernels, tokens, self._width, Type.FLOAT32)
        self._normed = _Buffer(self._kernels, tokens, self._width, self._activation)
        self._block = _Buffer(self._kernels, tokens, self._width, Type.FLOAT32)
        self._qkv = _Buffer(self._kernels, tokens, qkv, Type.FLOAT32)
        self._attended = _Buffer(self._kernels, tokens, attended, self._activation)
        self._gated = _Buffer(self._kernels, tokens, gated, self._activation)
        self._sampled = _Buffer(self._kernels, samples, self._width, self._activation)
        self._logits = _Buffer(self._kernels, samples, self._vocab_size, Type.FLOAT32)

    def _add_operations(self) -> None:
        decoder = self._decoder
        self._add_embedding()
        for layer in decoder.layers:
            self._add_attention(layer)
            self._add_mlp(layer)
        self._add_norm(decoder.norm, self._hidden, self._sampled, Rows.SAMPLED)
        self._add_linear(decoder.head, self._sampled, self._logits, rows=Rows.SAMPLED)

    def _add_embedding(self) -> None:
        decoder = self._decoder
        self._ops.append(
            EmbedOp(
                kind=Kind.EMBED,
                weight_type=TYPE_OF[decoder.embedding.dtype],
                weight=self._pointer(decoder.embedding),
                out=self._hidden.address,
                width=self._width,
                out_stride=self._hidden.stride,
                scale=decoder.embedding_factor,
            )
        )

    def _add_attention(self, layer: Layer) -> None:
        attention, cache = layer.attention, self._caches[layer.module]
        x = self._input(layer.attention_norm)
        self._add_linear(attention.qkv, x, self._qkv)
        self._add_rotary(attention, cache)
        self._add_attend(attention, cache)
        self._add_to_hidden(attention.out, self._attended, layer.attention_out_norm, layer.residual_factor)

    def _add_mlp(self, layer: Layer) -> None:
        x = self._input(layer.mlp_norm)
        self._add_gate(layer.mlp, x)
        self._add_to_hidden(layer.mlp.down, self._gated, layer.mlp_out_norm, layer.residual_factor)

    def _input(self, norm: Norm | None) -> _Buffer:
        """A block's input: the residual stream, normalised where the block has a norm before it."""
        if norm is None:
            return self._hidden
        self._add_norm(norm, self._hidden, self._normed, Rows.TOKENS)
        return self._normed

    def _add_to_hidden(self, projection: Projection, x: _Buffer, norm: Norm | None, factor: float) -> None:
        """hidden += factor * norm(x·Wᵀ + b)"""
        if norm is None:
            self._add_linear(projection, x, self._hidden, epilogue=Epilogue.ADD, factor=factor)
            return
        self._add_linear(projection, x, self._block)
        scaled = Norm(norm.weight * factor, norm.eps)
        self._add_norm(scaled, self._block, self._hidden, Rows.TOKENS, accumulate=True)

    def _add_norm(self, norm: Norm, x: _Buffer, out: _Buffer, rows: Rows, accumulate: bool = False) -> None:
        self._ops.append(
            NormOp(
                kind=Kind.NORM,
                rows=rows,
                x=x.address,
                weight=self._pointer(norm.weight),
                out=out.address,
                x_stride=x.stride,
                out_stride=out.stride,
                width=self._width,
                out_type=out.type,
                eps=norm.eps,
                accumulate=accumulate,
            )
        )

    def _add_linear(
        self, projection: Projection, x: _Buffer, y: _Buffer, rows: Rows = Rows.TOKENS,
        epilogue: Epilogue = Epilogue.STORE, factor: float = 1.0,
    ) -> None:  # fmt: skip
        op = self._linear(projection, x, y)
        op.rows, op.epilogue, op.factor = rows, epilogue, factor
        self._ops.append(op)

    def _add_gate(self, mlp: Mlp, x: _Buffer) -> None:
        op = self._linear(mlp.gate, x, self._gated)
        up = _packed(mlp.up)
        op.weight2, op.scale2, op.sums2 = up.address, up.scale or None, up.sums or None
        op.bias2 = self._pointer(mlp.up.bias)
        op.epilogue = _ACTIVATIONS[mlp.activation]
        self._ops.append(op)

    def _linear(self, projection: Projection, x: _Buffer, y: _Buffer) -> LinearOp:
        weight = _packed(projection)
        return LinearOp(
            kind=Kind.LINEAR,
            weight=weight.address,
            bias=self._pointer(projection.bias),
            scale=weight.scale or None,
            sums=weight.sums or None,
            x=x.address,
            y=y.address,
            n=weight.n,
            k=weight.k,
            x_stride=x.stride,
            y_stride=y.stride,
            weight_type=weight.type,
            x_type=x.type,
            y_type=y.type,
            factor=1.0,
        )

    def _add_rotary(self, attention: Attention, cache: NativeLayerCache) -> None:
        q_bytes = 4 * (attention.out.weight.k)
        kv_bytes = 4 * cache.num_kv_heads * cache.head_dim
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self._ops.append(
            RotaryOp(
                kind=Kind.ROTARY,
                kv_type=cache.type,
                q=self._qkv.address,
                k=self._qkv.address + q_bytes,
                v=self._qkv.address + q_bytes + kv_bytes,
                keys=cache.keys,
                values=cache.values,
                cos_sin=self._pointer(attention.cos_sin),
                q_norm=self._pointer(q_norm.weight if q_norm else None),
                k_norm=self._pointer(k_norm.weight if k_norm else None),
                stride=self._qkv.stride,
                num_heads=attention.out.weight.k // cache.head_dim,
                num_kv_heads=cache.num_kv_heads,
                head_dim=cache.head_dim,
                rotary_dim=0 if attention.cos_sin is None else attention.cos_sin.shape[1],
                block_size=cache.block_size,
                norm_whole=attention.norm_whole,
                eps=q_norm.eps if q_norm else 0.0,
            )
        )

    def _add_attend(self, attention: Attention, cache: NativeLayerCache) -> None:
        options = attention.options
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        self._ops.append(
            AttentionOp(
                kind=Kind.ATTENTION,
                kv_type=cache.type,
                q=self._qkv.address,
                keys=cache.keys,
                values=cache.values,
                sinks=self._pointer(sinks),
                out=self._attended.address,
                q_stride=self._qkv.stride,
                out_stride=self._attended.stride,
                num_heads=attention.out.weight.k // cache.head_dim,
                num_kv_heads=cache.num_kv_heads,
                head_dim=cache.head_dim,
                block_size=cache.block_size,
                window=options.sliding_window or 0,
                out_type=self._attended.type,
                scaling=options.scaling,
                softcap=options.softcap or 0.0,
            )
        )

    def _pointer(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _packed(projection: Projection) -> PackedWeight:
    assert isinstance(projection.weight, PackedWeight), "native kernels read packed weights"
    return projection.weight


class ProgramForward:
    def __init__(self, config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> None:
        """Raises ProgramUnsupportedError when this model must run as modules."""
        if loaded.kernels is None or loaded.decoder is None:
            raise ProgramUnsupportedError(loaded.why_modules)
        caches = native_caches(loaded.kernels, loaded.layer_shapes, num_blocks, config.block_size, loaded.dtype)
        if caches is None:
            raise ProgramUnsupportedError("its heads or its KV blocks do not fit the native layout")
        drafts = config.speculative_config.max_step_tokens if config.speculative_config else 0
        max_tokens = max(config.max_num_batched_tokens, drafts, MAX_PROBE_TOKENS)
        max_samples = max(config.max_step_samples, MAX_PROBE_TOKENS)
        self._program = DecoderProgram(loaded.kernels, loaded.decoder, caches, max_tokens, max_samples)
        loaded.checked.verify(self._all_logits)
        self._step: FlatStep
        """The last one that was computed."""

    def logits(self, plan: StepPlan, table: RowTable) -> torch.Tensor | None:
        """Logits float32 [samples, vocab], valid until the next step; None when no row samples."""
        self._step = flatten(plan, table)
        logits = self._program.forward(self._step, self._step.blocks_in_use(table))
        return torch.from_numpy(logits) if len(logits) else None

    def logits_behind(self, row: int, positions: Int32Array) -> torch.Tensor:
        step = self._step
        return torch.from_numpy(self._program.logits_behind(step, step.tokens_at(row, positions)))

    def close(self) -> None:
        pass

    def _all_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of one sequence, computed in the first block."""
        step = _whole_sequence(token_ids.numpy().astype(np.int32))
        return torch.from_numpy(self._program.forward(step, np.zeros((1, 1), np.int32)).copy())


def _whole_sequence(token_ids: Int32Array) -> FlatStep:
    """A step that computes one sequence from its start in block 0, and samples at every token."""
    length = np.array([len(token_ids)], np.int32)
    places = np.arange(len(token_ids), dtype=np.int32)
    return FlatStep(
        rows=np.zeros(1, np.int32),
        query_lens=length,
        seq_lens=length,
        query_start=np.array([0, len(token_ids)], np.int32),
        token_ids=token_ids,
        positions=places,
        slots=places,
        sampled_tokens=places,
    )
