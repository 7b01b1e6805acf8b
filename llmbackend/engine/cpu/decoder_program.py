"""A decoder-only model as a flat list of native operations. One call computes a whole step; if layers are in different
KV groups, one call per run of neighbouring layers of a group.

Used by the native runner, and by the packer, which compares a program with the model's modules. Independent of model
families, torch, requests and sampling. Invariants: all buffers are allocated once, for the largest step; the residual
stream is float32 throughout; the operations of a layer are listed in execution order; every address comes from a
validated description (cpu/packed_decoder.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..kernels.expert_layout import GATES, ExpertMatrix, experts_op, gated_experts_op
from ..kernels.library import PANEL, NativeKernels, op_pointers
from ..kernels.operations import Activation, EmbedOp, Epilogue, Kind, LinearOp, LoraOp, NormOp, Rows, Step, Type
from ..step import FlatStep, Int32Array
from .attention_operations import attention_gate, attention_op, rotary_op
from .buffers import Buffer, ExpertBuffers, LatentBuffers
from .lora import Input, LoraOps, ProgramAdapters, adapt
from .native_memory import NativeKVMemory, NativeLayerCache
from .operations import ROLE_OF, Operation, Role
from .packed_decoder import PackedAttention, PackedExpertMatrix, PackedExperts, PackedLayer, PackedMlp, PackedModel
from .packed_latent import PackedLatent
from .packed_parts import TYPE_OF, PackedNorm, PackedProjection
from .packed_recurrent import PackedScan, PackedShortConv, inputs_of
from .recurrent_operations import StateMemory, StepStates, mixer_operations

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_ACTIVATIONS: Final = {"gelu_tanh": Activation.GELU, "relu2": Activation.RELU2}
"""For MLPs without a gate."""


class _Part(NamedTuple):
    """Operations of one native call: neighbouring layers whose keys and values are in one KV group."""

    group: int
    pointers: Any
    num_ops: int


class DecoderProgram:
    def __init__(
        self,
        kernels: NativeKernels,
        packed: PackedModel,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_samples: int,
        adapters: ProgramAdapters | None = None,
        num_state_slots: int = 1,
    ) -> None:
        """num_blocks, block_size: of the KV memory. max_tokens, max_samples: of the largest step. adapters: None =
        steps have no adapters. num_state_slots: for recurrent layers. Raises MemoryError, or ValueError if the
        description is invalid."""
        decoder, memories = packed.decoder, packed.memories
        decoder.check(memories)
        self._kernels = kernels
        self._decoder = decoder
        self._memories = memories
        self._vocab_size = decoder.head.weight.n
        self._activation = kernels.library.activation_type(TYPE_OF[decoder.dtype])
        self._layer_groups = decoder.layer_groups
        of_first_group = zip(decoder.attentions, self._layer_groups.group_of, strict=True)
        shapes = [each.kv for each, group in of_first_group if group == 0]
        self._kv = NativeKVMemory(kernels.library, shapes, num_blocks, block_size, TYPE_OF[decoder.dtype])
        self._states = StateMemory(kernels.library, decoder, num_state_slots) if decoder.state_bytes else None
        self._max_tokens, self._max_samples = max_tokens, max_samples
        self._make_buffers(max_tokens, max_samples)
        self._loras = None if adapters is None else LoraOps(kernels, decoder, max_tokens, adapters)
        self.operations: list[Operation] = []
        """In execution order. Constant."""
        self._starts: list[tuple[int, int]] = []
        """First operation and KV group of each part."""
        self._add_operations()
        self._parts = self._parts_of(self.operations)
        """Including the operations that adapters need."""
        self._plain_parts = self._parts_of([each for each in self.operations if each.role != Role.LORA])
        self._head_pointers = op_pointers([operation.op for operation in self.operations[-2:]])

    def _parts_of(self, operations: list[Operation]) -> list[_Part]:
        """Of these operations in their order."""
        wanted = {id(operation.op) for operation in operations}
        ends = [first for first, _ in self._starts[1:]] + [len(self.operations)]
        parts = []
        for (first, group), end in zip(self._starts, ends, strict=True):
            ops = [operation.op for operation in self.operations[first:end] if id(operation.op) in wanted]
            parts.append(_Part(group, op_pointers(ops), len(ops)))
        return parts

    def forward(
        self, step: FlatStep, slots: Int32Array, block_tables: Int32Array, states: StepStates | None = None,
        has_adapters: bool = False,
    ) -> Float32Array:  # fmt: skip
        """Computes the step; logits float32 [samples, vocab], valid until the next call. Raises MemoryError.

        slots int32 [groups, tokens] and block_tables int32 [groups, rows, blocks]: of the step's rows, for each layer
        group. states: for recurrent layers. has_adapters: whether any token has an adapter.
        """
        for call in self._calls(step, slots, block_tables, states, self._parts if has_adapters else self._plain_parts):
            self._kernels.run(*call)
        return self._finished(self._logits.floats(len(step.sampled_tokens), self._vocab_size))

    def profile(
        self, step: FlatStep, slots: Int32Array, block_tables: Int32Array, states: StepStates | None = None
    ) -> Float64Array:
        """As `forward`, but returns the seconds of each of `operations`, without the last two if nothing is sampled."""
        calls = self._calls(step, slots, block_tables, states, self._parts)
        seconds = [self._kernels.profile(*call) for call in calls]
        self._finished(self._logits.floats(len(step.sampled_tokens), self._vocab_size))
        return np.concatenate(seconds)

    def write_kv(
        self, step: FlatStep, slots: Int32Array, block_tables: Int32Array, states: StepStates | None = None
    ) -> None:
        """Writes keys and values of the step's tokens and computes nothing else; their contents are those of the last
        step."""
        for pointers, num_ops, native_step in self._calls(step, slots, block_tables, states, self._plain_parts):
            writes = [each for each in pointers[:num_ops] if ctypes.c_int32.from_address(each).value == Kind.ROTARY]
            self._kernels.run((ctypes.c_void_p * len(writes))(*writes), len(writes), native_step)

    def _calls(
        self, step: FlatStep, slots: Int32Array, block_tables: Int32Array, states: StepStates | None,
        parts: list[_Part],
    ) -> Iterator[tuple[Any, int, Step]]:  # fmt: skip
        """The native calls of a step, to be made while iterating: the arrays that they read live as long as the
        iterator."""
        num_samples = len(step.sampled_tokens)
        if len(step.token_ids) > self._max_tokens or num_samples > self._max_samples:
            raise RuntimeError(
                f"a step of {len(step.token_ids)} tokens and {num_samples} samples exceeds the program's buffers"
            )
        slots, blocks = self._kv.kernels_slots(slots), self._kv.kernels_blocks(block_tables)
        tables = zip(slots, blocks, strict=True)
        steps = [self._native_step(step, *tables_of_group, states) for tables_of_group in tables]
        for part in parts[:-1]:
            yield part.pointers, part.num_ops, steps[part.group]
        last = parts[-1]
        yield last.pointers, last.num_ops if num_samples else last.num_ops - 2, steps[last.group]

    def _native_step(self, step: FlatStep, slots: Int32Array, blocks: Int32Array, states: StepStates | None) -> Step:
        arrays: tuple[Int32Array, ...] = (
            step.token_ids, step.positions, slots, step.query_start, step.seq_lens, blocks, step.sampled_tokens,
        )  # fmt: skip
        if self._states is not None:
            assert states is not None, "a step of a model with recurrent layers has states"
            arrays += states
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
        return Step(
            len(step.token_ids), len(step.rows), len(step.sampled_tokens), blocks.shape[1],
            *(array.ctypes.data for array in arrays),
        )  # fmt: skip

    def logits_behind(self, step: FlatStep, tokens: Int32Array) -> Float32Array:
        """Logits float32 [tokens, vocab] after these tokens of the last computed batch; valid until the next call."""
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
        layers, attentions = self._decoder.layers, self._decoder.attentions
        self._width = self._decoder.width
        mixers = [layer.mixer for layer in layers if layer.mixer is not None]
        qkv = [each.projected for each in (*attentions, *mixers)]
        attended = max(part.out.weight.k for part in (*attentions, *mixers))
        gated = max((layer.mlp.up.weight.n for layer in layers if layer.mlp is not None), default=0)
        self._hidden = Buffer(self._kernels.library, tokens, self._width, Type.FLOAT32)
        self._normed = Buffer(self._kernels.library, tokens, self._width, self._activation)
        self._block = Buffer(self._kernels.library, tokens, self._width, Type.FLOAT32)
        self._qkv = Buffer(self._kernels.library, tokens, max(qkv), Type.FLOAT32)
        self._attended = Buffer(self._kernels.library, tokens, attended, self._activation)
        is_gated = any(attention.has_gates for attention in attentions)
        self._ungated = Buffer(self._kernels.library, tokens if is_gated else 1, attended, Type.FLOAT32)
        by_key_head = [each.projected for each in mixers if isinstance(each, PackedScan) and each.by_key_head]
        self._arranged = Buffer(self._kernels.library, tokens, max(by_key_head, default=0), Type.FLOAT32)
        self._gated = Buffer(self._kernels.library, tokens, gated, self._activation)
        self._sampled = Buffer(self._kernels.library, samples, self._width, self._activation)
        self._logits = Buffer(self._kernels.library, samples, self._vocab_size, Type.FLOAT32)
        mixtures = [layer.experts for layer in layers if layer.experts is not None]
        latents = [each for each in attentions if each.latent is not None]
        self._latent_buffers = (
            LatentBuffers(self._kernels.library, tokens, latents, self._activation) if latents else None
        )
        self._expert_buffers = ExpertBuffers(self._kernels.library, tokens, mixtures) if mixtures else None

    def _add_operations(self) -> None:
        decoder = self._decoder
        groups = self._layer_groups
        self._starts.append((0, groups.group_of[0] if groups.group_of else 0))
        self._add_embedding()
        places = zip(groups.group_of, groups.place_of, strict=True)
        for index, layer in enumerate(decoder.layers):
            if layer.attention is not None:
                group, place = next(places)
                if group != self._starts[-1][1]:
                    self._starts.append((len(self.operations), group))
                self._add_attention(layer, layer.attention, self._kv.layers[place])
            if layer.mixer is not None:
                self._add_mixer(layer, layer.mixer, index)
            self._add_mlp(layer)
        self._add_norm(decoder.norm, self._hidden, self._sampled, Rows.SAMPLED)
        self._add_linear(Role.HEAD, decoder.head, self._sampled, self._logits, rows=Rows.SAMPLED)

    def _add_embedding(self) -> None:
        decoder = self._decoder
        self._add(
            Role.EMBEDDING,
            EmbedOp(
                kind=Kind.EMBED,
                weight_type=TYPE_OF[decoder.dtype],
                weight=self._memories.address(decoder.embedding),
                out=self._hidden.address,
                width=self._width,
                out_stride=self._hidden.stride,
                scale=decoder.embedding_factor,
            ),
        )

    def _add(self, role: Role, op: ctypes.Structure) -> None:
        self.operations.append(Operation(role, op))

    def _add_attention(self, layer: PackedLayer, attention: PackedAttention, cache: NativeLayerCache) -> None:
        x = self._input(layer.attention_norm)
        if attention.latent is None:
            self._add_qkv(attention, x)
        else:
            self._add_latent_qkv(attention, attention.latent, x)
        self._add_attend(attention, cache)
        if layer.is_parallel and layer.mlp is not None:
            self._add_gate(layer.mlp, x)
        out_norm, factor = layer.attention_out_norm, layer.residual_factor
        self._add_to_hidden(Role.ATTENTION_OUT, attention.out, self._attended, out_norm, factor)

    def _add_qkv(self, attention: PackedAttention, x: Buffer) -> None:
        column = 0
        for together in attention.inputs:
            lora, panel = self._add_lora(x, *together), 0
            for part in together:
                place = self._qkv.from_column(column)
                self._add_linear(Role.QKV, part, x, place, lora=lora, lora_panel=panel)
                column += part.weight.n
                panel += part.weight.n // PANEL

    def _add_latent_qkv(self, attention: PackedAttention, latent: PackedLatent, x: Buffer) -> None:
        """Queries, without their rotary parts, followed by the key."""
        buffers, of_value, rotary = self._latent_buffers, *attention.qkv
        assert buffers is not None, "latent attention has buffers"
        key = self._qkv.from_column(attention.num_heads * attention.head_dim)
        value = key.from_column(rotary.weight.n)
        lora = self._add_lora(x, *attention.inputs[0])
        self._add_linear(Role.QKV, of_value, x, value, lora=lora)
        panel = of_value.weight.n // PANEL
        self._add_linear(Role.QKV, rotary, x, key, lora=lora, lora_panel=panel)
        self._add_norm(latent.norm, value, value, Rows.TOKENS, width=latent.rank)
        panel += rotary.weight.n // PANEL
        if latent.q_down is not None and latent.q_norm is not None:
            self._add_linear(Role.QKV, latent.q_down, x, buffers.compressed, lora=lora, lora_panel=panel)
            self._add_norm(latent.q_norm, buffers.compressed, buffers.normed, Rows.TOKENS, width=latent.q_down.weight.n)
            x, lora, panel = buffers.normed, self._add_lora(buffers.normed, latent.q), 0
        self._add_linear(Role.QKV, latent.q, x, buffers.queries, lora=lora, lora_panel=panel)
        self._add(Role.LATENT, buffers.up_op(attention, latent, self._memories, self._qkv))

    def _add_attend(self, attention: PackedAttention, cache: NativeLayerCache) -> None:
        latent, buffers, qkv, out = attention.latent, self._latent_buffers, self._qkv, self._attended
        if latent is None or buffers is None:
            self._add(Role.ROTARY, rotary_op(attention, cache, qkv, self._memories))
            attended = self._ungated if attention.has_gates else out
            self._add(Role.ATTENTION, attention_op(attention, cache, qkv, attended, self._memories))
            if attention.has_gates:
                self._add(Role.GATE, attention_gate(attention, attended, qkv, out))
            return
        turned = buffers.queries.from_column(latent.up.k), latent.up.k + attention.head_dim - latent.rank
        self._add(Role.ROTARY, rotary_op(attention, cache, qkv, self._memories, *turned))
        self._add(Role.ATTENTION, attention_op(attention, cache, qkv, buffers.weighted, self._memories))
        self._add(Role.LATENT, buffers.down_op(attention, latent, self._memories, out))

    def _add_mixer(self, layer: PackedLayer, mixer: PackedShortConv | PackedScan, index: int) -> None:
        states = self._states
        assert states is not None, "recurrent layers have states"
        # A mixer parallel to attention reads the same input.
        x = self._input(layer.attention_norm) if layer.attention is None else self._normed
        self._add_projects(mixer, x)
        buffers, place = (self._qkv, self._arranged, self._attended), (states.address(index), states.slot_floats)
        for op in mixer_operations(mixer, self._memories, *buffers, *place):
            self._add(ROLE_OF[type(op)], op)
        out_norm, factor = layer.attention_out_norm, layer.mixer_factor
        self._add_to_hidden(Role.MIXER_OUT, mixer.out, self._attended, out_norm, factor)

    def _add_projects(self, mixer: PackedShortConv | PackedScan, x: Buffer) -> None:
        column = 0
        for together in inputs_of(mixer)[:-1]:
            lora, panel = self._add_lora(x, *together), 0
            for project in together:
                place = self._qkv.from_column(column)
                self._add_linear(Role.MIXER, project, x, place, lora=lora, lora_panel=panel)
                column += project.weight.n
                panel += -(-project.weight.n // PANEL)

    def _add_mlp(self, layer: PackedLayer) -> None:
        if layer.experts is not None:
            self._add_experts(layer, layer.experts)
        elif layer.mlp is not None:
            if not layer.is_parallel:
                self._add_gate(layer.mlp, self._input(layer.mlp_norm))
            self._add_to_hidden(Role.DOWN, layer.mlp.down, self._gated, layer.mlp_out_norm, layer.mlp_factor)

    def _add_experts(self, layer: PackedLayer, experts: PackedExperts) -> None:
        """The router and the experts read float32; the shared expert reads the usual activation type."""
        buffers = self._expert_buffers
        assert buffers is not None, "experts have buffers"
        x, shared = self._hidden, layer.mlp
        if layer.mlp_norm is not None:
            x = buffers.normed
            self._add_norm(layer.mlp_norm, self._hidden, x, Rows.TOKENS)
        if shared is not None:
            self._add_gate(shared, self._input(layer.mlp_norm))
            lora = self._add_lora(self._gated, shared.down)
            self._add_linear(Role.DOWN, shared.down, self._gated, buffers.shared, lora=lora)
        if experts.shared_gate is not None:
            lora = self._add_lora(x, experts.shared_gate)
            self._add_linear(Role.DOWN, experts.shared_gate, x, buffers.shared_gate, lora=lora)
        self._add_linear(Role.ROUTE, experts.router, x, buffers.logits)
        self._add(Role.ROUTE, buffers.route_op(experts, self._memories.address_if_any(experts.correction)))
        up, down = (self._expert_matrix(each, experts.count) for each in (experts.up, experts.down))
        gate = None if experts.gate is None else self._expert_matrix(experts.gate, experts.count)
        pairs = buffers.pairs(experts)
        rows = [(each.address, each.stride) for each in (x, buffers.gated, buffers.mixed)]
        self._add(Role.EXPERTS_GATE_UP, gated_experts_op(pairs, gate, up, rows[0], rows[1], experts.activation))
        self._add(Role.EXPERTS_DOWN, experts_op(pairs, down, rows[1], rows[2], False))
        out, norm = self._hidden if layer.mlp_out_norm is None else self._block, layer.mlp_out_norm
        mix = buffers.mix_op(experts, shared is not None, self._width)
        mix.out, mix.out_stride = out.address, out.stride
        mix.accumulate, mix.factor = norm is None, layer.mlp_factor
        self._add(Role.MIX, mix)
        if norm is not None:
            self._add_norm(norm, self._block, self._hidden, Rows.TOKENS, accumulate=True)

    def _expert_matrix(self, matrix: PackedExpertMatrix, count: int) -> ExpertMatrix:
        first = matrix.first
        panels, scale, sums = self._memories.matrix_addresses(first)
        assert panels is not None, "a matrix has panels"
        bias, order = self._memories.address_if_any(matrix.bias), self._memories.order_address(first, count)
        return ExpertMatrix(panels, scale, sums, first.n, first.k, TYPE_OF[first.dtype], bias, order)

    def _input(self, norm: PackedNorm | None) -> Buffer:
        """A block's input: the residual stream, normalised if the block has an input norm."""
        if norm is None:
            return self._hidden
        self._add_norm(norm, self._hidden, self._normed, Rows.TOKENS)
        return self._normed

    def _add_to_hidden(
        self, role: Role, projection: PackedProjection, x: Buffer, norm: PackedNorm | None, factor: float
    ) -> None:
        """hidden += norm(x·Wᵀ + b), or without a norm, factor * (x·Wᵀ + b)"""
        lora = self._add_lora(x, projection)
        if norm is None:
            self._add_linear(role, projection, x, self._hidden, epilogue=Epilogue.ADD, factor=factor, lora=lora)
            return
        self._add_linear(role, projection, x, self._block, lora=lora)
        self._add_norm(norm, self._block, self._hidden, Rows.TOKENS, accumulate=True)

    def _add_norm(
        self, norm: PackedNorm, x: Buffer, out: Buffer, rows: Rows, accumulate: bool = False, width: int = 0
    ) -> None:
        """width: 0 = the model's."""
        self._add(
            Role.NORM,
            NormOp(
                kind=Kind.NORM,
                rows=rows,
                x=x.address,
                weight=self._memories.address(norm.weight),
                bias=self._memories.address_if_any(norm.bias),
                out=out.address,
                x_stride=x.stride,
                out_stride=out.stride,
                width=width or self._width,
                out_type=out.type,
                eps=norm.eps,
                accumulate=accumulate,
                centred=norm.centred,
            ),
        )

    def _add_linear(
        self, role: Role, projection: PackedProjection, x: Buffer, y: Buffer, rows: Rows = Rows.TOKENS,
        epilogue: Epilogue = Epilogue.STORE, factor: float = 1.0, lora: LoraOp | None = None,
        activation: Activation = Activation.NONE, lora_panel: int = 0,
    ) -> None:  # fmt: skip
        """lora: for this input; its lora_panel is the panel of the first output."""
        op = self._linear(projection, x, y)
        adapt(op, lora, lora_panel)
        op.rows, op.epilogue, op.factor, op.activation = rows, epilogue, factor, activation
        self._add(role, op)

    def _add_lora(self, x: Buffer, *projections: PackedProjection) -> LoraOp | None:
        """The adapter operation for these projections of x."""
        if self._loras is None or not any(projection.parts for projection in projections):
            return None
        op = self._loras.of(Input(x.address, x.type, x.stride), projections)
        self._add(Role.LORA, op)
        return op

    def _add_gate(self, mlp: PackedMlp, x: Buffer) -> None:
        if mlp.gate is None:
            lora = self._add_lora(x, mlp.up)
            self._add_linear(Role.GATE_UP, mlp.up, x, self._gated, lora=lora, activation=_ACTIVATIONS[mlp.activation])
            return
        lora = self._add_lora(x, mlp.gate, mlp.up)
        op = self._linear(mlp.gate, x, self._gated)
        adapt(op, lora)
        op.weight2, op.scale2, op.sums2 = self._memories.matrix_addresses(mlp.up.weight)
        op.bias2 = self._memories.address_if_any(mlp.up.bias)
        op.epilogue, op.factor = GATES[mlp.activation], mlp.gate_factor
        self._add(Role.GATE_UP, op)

    def _linear(self, projection: PackedProjection, x: Buffer, y: Buffer) -> LinearOp:
        weight = projection.weight
        panels, scale, sums = self._memories.matrix_addresses(weight)
        return LinearOp(
            kind=Kind.LINEAR,
            weight=panels,
            bias=self._memories.address_if_any(projection.bias),
            scale=scale,
            sums=sums,
            order=self._memories.order_address(weight),
            x=x.address,
            y=y.address,
            n=weight.n,
            k=weight.k,
            x_stride=x.stride,
            y_stride=y.stride,
            weight_type=TYPE_OF[weight.dtype],
            x_type=x.type,
            y_type=y.type,
            factor=1.0,
        )
