"""The operations of mixtures of experts: routes against numpy, experts against the linear layer of each, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.expert_layout import ExpertMatrix, Pairs, experts_op
from llmbackend.engine.kernels.library import BLOCKS, NativeKernels, op_pointers
from llmbackend.engine.kernels.operations import Epilogue, Kind, LinearOp, MixOp, RouteOp, Rows, Step, Type
from llmbackend.engine.kernels.weights import PackedWeight, StoredBlocks, WeightStore
from tests.engine.test_native_linear import tile_product
from tests.helpers.native_engines import Array, best_is_fast, engine, from_bf16, fused_vectors, to_bf16

VARIANTS = list(library.available())
UNPACKED = [Type.Q8_0, Type.IQ4_NL]
"""Types of which AVX2 alone unpacks weights and rows to 16 bits, from twelve rows on."""
KINDS = [Type.FLOAT32, Type.BFLOAT16, Type.INT8, Type.INT4, Type.INT4_MIN, Type.MXFP4, Type.Q6_K, *UNPACKED]
WIDTH, INNER, EXPERTS, TOP_K = 256, 256, 6, 2
SOFTMAX, SIGMOID = 0, 1

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no native kernels are built")


@dataclass
class Route:
    """One step's routes, computed by the kernels, and by numpy in float64."""

    chosen: Array
    shares: Array
    places: Array
    first: Array

    @staticmethod
    def of(
        kernels: NativeKernels, logits: Array, top_k: int, scores: int = SOFTMAX, renormalises: bool = True,
        factor: float = 1.0, correction: Array | None = None, groups: int = 0, top_groups: int = 0, of_group: int = 2,
        epsilon: float = 0,
    ) -> Route:  # fmt: skip
        tokens, count = logits.shape
        padded = np.full((tokens, count + 3), np.nan, np.float32)
        padded[:, :count] = logits
        chosen, places = (np.full((tokens, top_k), -1, np.int32) for _ in range(2))
        shares, first = np.full((tokens, top_k), np.nan, np.float32), np.full(count + 1, -1, np.int32)
        op = RouteOp(
            kind=Kind.ROUTE, scores=scores, logits=padded.ctypes.data, chosen=chosen.ctypes.data,
            shares=shares.ctypes.data, places=places.ctypes.data, first=first.ctypes.data, stride=count + 3,
            num_experts=count, top_k=top_k, groups=groups, top_groups=top_groups, renormalises=renormalises,
            factor=factor, epsilon=epsilon, of_group=of_group,
            correction=None if correction is None else correction.ctypes.data,
        )  # fmt: skip
        kernels.run(op_pointers([op]), 1, Step(num_tokens=tokens))
        return Route(chosen, shares, places, first)


def logits(tokens: int, count: int) -> Array:
    return np.random.default_rng(count).standard_normal((tokens, count)).astype(np.float32)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("count", [2, 7, 64, 130])
@pytest.mark.parametrize("renormalises", [False, True])
def test_the_largest_are_chosen_with_their_shares_of_a_softmax(variant: str, count: int, renormalises: bool) -> None:
    given, top_k = logits(29, count), min(count, 6)
    route = Route.of(engine(variant, 2), given, top_k, renormalises=renormalises, factor=2.5)
    expected = np.argsort(-given, axis=1, kind="stable")[:, :top_k]
    assert np.array_equal(route.chosen, expected)
    weights = np.exp(given.astype(np.float64))
    shares = np.take_along_axis(weights, expected, 1)
    whole = shares if renormalises else weights
    np.testing.assert_allclose(route.shares, 2.5 * shares / whole.sum(1, keepdims=True), rtol=2e-6)


def test_equal_scores_are_taken_in_the_order_of_experts() -> None:
    given = np.zeros((3, 9), np.float32)
    given[1, [2, 7]] = 1
    route = Route.of(engine(VARIANTS[0]), given, 3)
    assert route.chosen.tolist() == [[0, 1, 2], [2, 7, 0], [0, 1, 2]]


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("of_group", [1, 2])
def test_a_correction_and_groups_choose_and_do_not_weigh(variant: str, of_group: int) -> None:
    """As of DeepSeek V3 and GLM-4: groups by their two largest scores; of DeepSeek V2 by the largest."""
    given = logits(40, 32)
    correction = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    kernels = engine(variant, 2)
    route = Route.of(
        kernels, given, 5, SIGMOID, correction=correction, groups=4, top_groups=2, of_group=of_group, epsilon=0.1
    )
    scores = 1 / (1 + np.exp(-given.astype(np.float64)))
    corrected = scores + correction
    groups = np.sort(corrected.reshape(40, 4, 8), axis=2)[:, :, -of_group:].sum(2)
    left = np.argsort(-groups, axis=1)[:, 2:]
    for token in range(40):
        corrected.reshape(40, 4, 8)[token, left[token]] = -np.inf
    expected = np.argsort(-corrected, axis=1, kind="stable")[:, :5]
    assert np.array_equal(route.chosen, expected)
    shares = np.take_along_axis(scores, expected, 1)
    np.testing.assert_allclose(route.shares, shares / (shares.sum(1, keepdims=True) + 0.1), rtol=3e-6)


def test_pairs_have_places_by_expert_and_then_by_token() -> None:
    route = Route.of(engine(VARIANTS[0], 2), logits(33, 6), 3)
    flat = route.chosen.reshape(-1)
    assert np.array_equal(np.argsort(flat, kind="stable"), np.argsort(route.places.reshape(-1)))
    assert route.first.tolist() == [0, *np.bincount(flat, minlength=6).cumsum().tolist()]


class Experts:
    """Two random matrices for each of a layer's experts, and biases."""

    def __init__(self, kernels: NativeKernels, kind: Type, n: int = INNER, k: int = WIDTH) -> None:
        self.kernels, self.kind, self.n, self.k = kernels, kind, n, k
        self.store = WeightStore(kernels, [(n, k, kind)] * (2 * EXPERTS))
        self.matrices: list[torch.Tensor] = []
        random = np.random.default_rng(kind)
        self.packed = [[self._pack(random) for _ in range(EXPERTS)] for _ in range(2)]
        self.biases = random.standard_normal((2, EXPERTS, n)).astype(np.float32)

    def _pack(self, random: np.random.Generator) -> PackedWeight:
        if (form := BLOCKS.get(self.kind)) is not None:
            blocks = random.integers(0, 256, (self.n, self.k // form.k * form.file_bytes), np.uint8)
            return self.store.pack_blocks(StoredBlocks(self.kind, blocks & np.uint8(0xBB)))
        matrix = torch.from_numpy(random.standard_normal((self.n, self.k)).astype(np.float32))
        matrix = matrix.bfloat16() if self.kind is Type.BFLOAT16 else matrix
        self.matrices.append(matrix)
        return self.store.pack(matrix, self.kind)

    def x(self, tokens: int) -> Array:
        x = np.random.default_rng(tokens).standard_normal((tokens, self.k)).astype(np.float32)
        x[::3, 5] *= 300  # what int8 rows have in two parts
        return x

    def matrix(self, which: int) -> ExpertMatrix:
        first = self.packed[which][0]
        bias = self.biases[which].ctypes.data
        return ExpertMatrix(first.address, first.scale or None, first.sums or None, self.n, self.k, self.kind, bias)

    def run(
        self, x: Array, chosen: Array, epilogue: Epilogue, threads: int = 1, of_tokens: bool = True,
        orders: Array | None = None,
    ) -> Array:  # fmt: skip
        """float32 [pairs, n], in the order of tokens and ranks. orders: of the inputs of each expert."""
        top_k = chosen.shape[1]
        flat = chosen.reshape(-1)
        places = np.empty(len(flat), np.int32)
        places[np.argsort(flat, kind="stable")] = np.arange(len(flat), dtype=np.int32)
        first = np.zeros(EXPERTS + 1, np.int32)
        first[1:] = np.bincount(flat, minlength=EXPERTS).cumsum()
        if not of_tokens:
            repeated = np.empty((len(flat), self.k), np.float32)
            repeated[places] = np.repeat(x, top_k, axis=0)
            x = repeated
        y = np.full((len(flat), self.n + 5), np.nan, np.float32)
        pairs = Pairs(EXPERTS, top_k, first.ctypes.data, places.ctypes.data)
        up = None if epilogue is Epilogue.STORE else self.matrix(1)
        rows = [(each.ctypes.data, each.shape[1]) for each in (x, y)]
        matrix = self.matrix(0)._replace(order=None if orders is None else orders.ctypes.data)
        op = experts_op(pairs, matrix, rows[0], rows[1], of_tokens, up, epilogue)
        kernels = self.kernels if threads == 1 else NativeKernels(self.kernels.library, threads)
        kernels.run(op_pointers([op]), 1, Step(num_tokens=len(chosen)))
        assert np.isnan(y[:, self.n :]).all(), "wrote past the columns"
        return y[places, : self.n]

    def expected(self, x: Array, chosen: Array, epilogue: Epilogue, orders: Array | None = None) -> Array:
        """By the linear layers of single experts."""
        inputs = [x if orders is None else np.ascontiguousarray(x[:, orders[expert]]) for expert in range(EXPERTS)]
        of_all = np.stack([self._linear(inputs[expert], expert, epilogue) for expert in range(EXPERTS)])
        return of_all[chosen.reshape(-1), np.repeat(np.arange(len(x)), chosen.shape[1])]

    def _linear(self, x: Array, expert: int, epilogue: Epilogue) -> Array:
        one, two = (packed[expert] for packed in self.packed)
        y = np.empty((len(x), self.n), np.float32)
        x_type = Type.FLOAT32
        if self.kind is Type.BFLOAT16 and self.kernels.library.activation_type(Type.BFLOAT16) is not Type.FLOAT32:
            x_type, x = Type.BFLOAT16, torch.from_numpy(x).bfloat16().view(torch.int16).numpy()
        op = LinearOp(
            kind=Kind.LINEAR, rows=Rows.TOKENS, weight=one.address, scale=one.scale or None, sums=one.sums or None,
            bias=self.biases[0, expert].ctypes.data, x=x.ctypes.data, y=y.ctypes.data, n=self.n, k=self.k,
            x_stride=self.k, y_stride=self.n, weight_type=self.kind, x_type=x_type, y_type=Type.FLOAT32,
            epilogue=epilogue, factor=1.0,
        )  # fmt: skip
        if epilogue is not Epilogue.STORE:
            op.weight2, op.scale2, op.sums2 = two.address, two.scale or None, two.sums or None
            op.bias2 = self.biases[1, expert].ctypes.data
        self.kernels.run(op_pointers([op]), 1, Step(num_tokens=len(x)))
        return y


def chosen_of(tokens: int) -> Array:
    """Some experts have many rows, two have none."""
    random = np.random.default_rng(tokens)
    return np.stack([random.permutation([0, 1, 2, 4])[:TOP_K] for _ in range(tokens)]).astype(np.int32)


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.SILU_MUL, Epilogue.SWIGLU_OAI])
def test_each_row_is_multiplied_by_its_expert(variant: str, kind: Type, epilogue: Epilogue) -> None:
    experts = Experts(engine(variant), kind)
    for tokens in (1, 3, 40):
        x, chosen = experts.x(tokens), chosen_of(tokens)
        expected = experts.expected(x, chosen, epilogue)
        for threads in (1, 3):
            assert np.array_equal(experts.run(x, chosen, epilogue, threads), expected), f"{tokens} tokens"
        assert np.array_equal(experts.run(x, chosen, epilogue, of_tokens=False), expected)


@pytest.mark.skipif("avx2" not in VARIANTS, reason="no AVX2")
@pytest.mark.parametrize("kind", UNPACKED)
def test_avx2_multiplies_unpacked_rows_by_all_their_experts(kind: Type) -> None:
    experts = Experts(engine("avx2"), kind, n=32, k=64)
    x, chosen = experts.x(40), chosen_of(40)
    assert np.array_equal(experts.run(x, chosen, Epilogue.STORE), experts.expected(x, chosen, Epilogue.STORE))


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", [Type.INT4, Type.INT4_MIN])
@pytest.mark.parametrize("of_tokens", [True, False])
def test_each_expert_may_have_an_order_of_inputs(variant: str, kind: Type, of_tokens: bool) -> None:
    experts, random = Experts(engine(variant), kind), np.random.default_rng(4)
    orders = np.stack([random.permutation(WIDTH) for _ in range(EXPERTS)]).astype(np.int32)
    for tokens in (1, 3, 40):
        x, chosen = experts.x(tokens), chosen_of(tokens)
        expected = experts.expected(x, chosen, Epilogue.SILU_MUL, orders)
        for threads in (1, 3):
            found = experts.run(x, chosen, Epilogue.SILU_MUL, threads, of_tokens, orders)
            assert np.array_equal(found, expected), f"{tokens} tokens, {threads} threads"


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_every_batch(variant: str, kind: Type) -> None:
    experts = Experts(engine(variant), kind, n=96)
    x, chosen = experts.x(300), chosen_of(300)
    whole = experts.run(x, chosen, Epilogue.SILU_MUL, threads=2)
    for tokens in (1, 2, 13, 64, 299):
        assert np.array_equal(experts.run(x[:tokens], chosen[:tokens], Epilogue.SILU_MUL), whole[: TOP_K * tokens])
    last = experts.run(x[-1:], chosen[-1:], Epilogue.SILU_MUL)
    assert np.array_equal(last, whole[-TOP_K:])


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("kind", [Type.FLOAT32, Type.BFLOAT16, Type.INT8, Type.INT4_MIN])
def test_sizes_need_not_be_those_of_panels(variant: str, kind: Type) -> None:
    experts = Experts(engine(variant), kind, n=45, k=77)
    x, chosen = experts.x(9), chosen_of(9)
    assert np.array_equal(
        experts.run(x, chosen, Epilogue.GELU_MUL, threads=2), experts.expected(x, chosen, Epilogue.GELU_MUL)
    )


ROWS_OF_EXPERTS = (0, 1, 15, 16, 17, 100)


def of_all_sizes() -> Array:
    """One expert for each token."""
    experts = np.repeat(np.arange(EXPERTS, dtype=np.int32), ROWS_OF_EXPERTS)
    return np.random.default_rng(2).permutation(experts)[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "k", "epilogue"), [(70, 256, Epilogue.SILU_MUL), (33, 1280, Epilogue.GELU_MUL), (20, 8192, Epilogue.STORE)]
)
def test_tiles_multiply_any_number_of_rows(
    tiles: NativeKernels, kind: Type, n: int, k: int, epilogue: Epilogue
) -> None:
    experts = Experts(tiles, kind, n, k)
    chosen = of_all_sizes()
    x = experts.x(len(chosen))
    whole = experts.run(x, chosen, epilogue)
    assert np.array_equal(whole, experts.expected(x, chosen, epilogue))
    assert np.array_equal(experts.run(x, chosen, epilogue, threads=3, of_tokens=False), whole)
    for tokens in (1, 40):
        assert np.array_equal(experts.run(x[:tokens], chosen[:tokens], epilogue), whole[:tokens])


@pytest.mark.parametrize(("n", "k"), [(45, 77), (33, 1130)])
def test_rows_of_bfloat16_on_tiles_are_rounded_and_filled_up(tiles: NativeKernels, n: int, k: int) -> None:
    experts = Experts(tiles, Type.BFLOAT16, n, k)
    chosen = of_all_sizes()
    x = experts.x(len(chosen))
    weights = [matrix.float().numpy() for matrix in experts.matrices[:EXPERTS]]
    of_all = np.stack([tile_product(from_bf16(to_bf16(x)), weight) for weight in weights]) + experts.biases[0][:, None]
    expected = of_all[chosen[:, 0], np.arange(len(x))]
    assert np.array_equal(experts.run(x, chosen, Epilogue.STORE), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Type.BFLOAT16])
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.SWIGLU_OAI])
def test_tiles_give_the_bits_of_vectors(tiles: NativeKernels, kind: Type, epilogue: Epilogue) -> None:
    chosen = of_all_sizes()
    on_tiles, on_vectors = (Experts(kernels, kind, 70, 512) for kernels in (tiles, fused_vectors()))
    x = on_tiles.x(len(chosen))
    assert np.array_equal(on_tiles.run(x, chosen, epilogue), on_vectors.run(x, chosen, epilogue))


def test_no_tokens_are_no_error() -> None:
    experts = Experts(engine(VARIANTS[0], 2), Type.INT4_MIN)
    assert experts.run(experts.x(0), chosen_of(1)[:0], Epilogue.SILU_MUL).shape == (0, INNER)
    assert Route.of(engine(VARIANTS[0], 2), logits(0, 4), 2).first.tolist() == [0] * 5


@pytest.mark.parametrize("variant", best_is_fast(VARIANTS))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_outputs_are_added_by_rank(variant: str, accumulate: bool, shared: str) -> None:
    random = np.random.default_rng(1)
    tokens, top_k, width = 7, 3, 1030
    shapes = ((tokens * top_k, width), (tokens, width), (tokens, 1))
    mixed, own, gate = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    shares = random.random((tokens, top_k)).astype(np.float32)
    places = random.permutation(tokens * top_k).astype(np.int32).reshape(tokens, top_k)
    out = np.ones((tokens, width + 3), np.float32)
    op = MixOp(
        kind=Kind.MIX, top_k=top_k, mixed=mixed.ctypes.data, places=places.ctypes.data, shares=shares.ctypes.data,
        shared=own.ctypes.data if shared != "none" else None,
        shared_gate=gate.ctypes.data if shared == "gated" else None,
        out=out.ctypes.data, mixed_stride=width, shared_stride=width, gate_stride=1, out_stride=width + 3, width=width,
        accumulate=accumulate, factor=0.5,
    )  # fmt: skip
    engine(variant, 2).run(op_pointers([op]), 1, Step(num_tokens=tokens))
    expected = (mixed.astype(np.float64)[places] * shares[:, :, None]).sum(1)
    if shared != "none":
        expected += own / (1 + np.exp(-gate.astype(np.float64))) if shared == "gated" else own
    expected = 1 + 0.5 * expected if accumulate else expected
    np.testing.assert_allclose(out[:, :width], expected, rtol=1e-5, atol=1e-5)
    assert (out[:, width:] == 1).all()
