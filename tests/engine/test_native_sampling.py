"""Native sampling chooses what torch chooses, follows the distribution, and never looks at its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels
from llmbackend.engine.messages import BANNED_BIAS, InferRequest, SamplingParams
from llmbackend.engine.sampling.torch_sampling import TorchSampler
from llmbackend.engine.step import BROKEN_LOGITS, NO_TOKEN, RowTable, SampledTokens
from llmbackend.engine.token_masks import TokenMasks, only
from llmbackend.testing.mock_model import sample as plain_sample
from tests.helpers.native_engines import best_is_fast
from tests.helpers.sampling_parameters import random_parameters

EOS, NUM_PROMPT, NUM_TOKENS = (3, 4), 5, 9
pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernels are built")


@pytest.fixture(params=best_is_fast(library.available() or ("none",)), scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    loaded = library.load(request.param)
    assert loaded is not None
    native = NativeKernels(loaded, 2)
    yield native
    native.close()


class Rows:
    """A sampler, and a table with one row for each set of parameters; the rows' tokens are drawn once."""

    def __init__(self, parameters: list[dict[str, Any]], vocab: int, native: NativeKernels | None) -> None:
        self.table = RowTable(len(parameters), 16, 16)
        self.table.token_ids[:] = np.random.default_rng(1).integers(0, vocab, self.table.token_ids.shape)
        self.table.num_prompt_tokens[:], self.table.num_tokens[:] = NUM_PROMPT, NUM_TOKENS
        self.sampler = TorchSampler(len(parameters), vocab, EOS, native)
        for row, each in enumerate(parameters):
            prompt = tuple(self.table.token_ids[row, :NUM_PROMPT].tolist())
            request = InferRequest(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**each))
            self.sampler.add_row(row, request)

    def sample(self, logits: torch.Tensor, rows: list[int] | None = None) -> SampledTokens:
        chosen = np.array(range(len(logits)) if rows is None else rows, np.int32)
        return self.sampler.sample(chosen, self.table.num_tokens[chosen], logits, self.table)

    def plain(self, row: int, logits: torch.Tensor, parameters: dict[str, Any]) -> Any:
        tokens = self.table.token_ids[row, :NUM_TOKENS]
        return plain_sample(logits.double().numpy(), tokens, NUM_PROMPT, SamplingParams(**parameters), EOS)


def make_logits(kind: str, rows: int, vocab: int) -> torch.Tensor:
    normal = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "equal":
        return torch.full((rows, vocab), -2.5)
    if kind == "one hot":
        return torch.nn.functional.one_hot(torch.arange(rows) % vocab, vocab) * 500.0
    if kind == "with minus infinities":
        return torch.where(normal < 1.5, torch.tensor(-torch.inf), normal).index_fill(1, torch.tensor([5]), 0.1)
    return normal * {"flat": 0.01, "usual": 3.0, "peaked": 12.0}[kind]


KINDS = ("flat", "usual", "peaked", "equal", "one hot", "with minus infinities")


def parameters_of(vocab: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(vocab)
    return [random_parameters(rng, vocab, largest_top_p=0.99999, most_logprobs=900) for _ in range(24)]


@cache
def sampled_by_torch(kind: str, dtype: torch.dtype, vocab: int) -> SampledTokens:
    """The same for every native library."""
    return Rows(parameters_of(vocab), vocab, None).sample(make_logits(kind, 24, vocab + 3).to(dtype))


@pytest.mark.parametrize("vocab", [6, 255, 256, 2000, 33000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_torch(
    engine: NativeKernels, kind: str, dtype: torch.dtype, vocab: int
) -> None:
    parameters, logits = parameters_of(vocab), make_logits(kind, 24, vocab + 3).to(dtype)
    expected = sampled_by_torch(kind, dtype, vocab)
    found = Rows(parameters, vocab, engine).sample(logits)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.errors == expected.errors == {}
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, (theirs,) in expected.logprobs.items():
        (ours,) = found.logprobs[row]
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-5, abs=1e-5)
        ours_top, theirs_top = ([value for _, value in one.top] for one in (ours, theirs))
        np.testing.assert_allclose(ours_top, theirs_top, rtol=1e-5, atol=1e-5)


def test_tokens_are_those_of_the_plain_sampler(engine: NativeKernels) -> None:
    rng, vocab = np.random.default_rng(3), 700
    # Without any limit, the plain sampler draws in another order.
    parameters = [
        random_parameters(rng, vocab, largest_top_p=0.99999, most_logprobs=900)
        | {"top_k": int(rng.choice([2, 30, 600]))}
        for _ in range(60)
    ]
    for kind in ("usual", "flat"):
        logits, rows = make_logits(kind, 60, vocab), Rows(parameters, vocab, engine)
        expected = [rows.plain(row, logits[row], each)[0] for row, each in enumerate(parameters)]
        assert rows.sample(logits).token_ids.tolist() == expected


def test_bad_words_are_not_completed(engine: NativeKernels) -> None:
    vocab = 700
    logits = make_logits("usual", 3, vocab)
    plain = Rows([{"temperature": 0.0, "logprobs": 1}] * 3, vocab, engine)
    best = logits.argmax(-1).tolist()
    last = plain.table.token_ids[:, NUM_TOKENS - 3 : NUM_TOKENS].tolist()
    words = [
        ((*last[0], best[0]), (last[0][-1], 1)),  # this one is about to be completed
        ((last[1][0], best[1]), (best[1], best[1])),  # these are not
        ((last[2][-1], best[2]), (*last[2], 5)),
    ]
    parameters = [{"temperature": 0.0, "logprobs": 1, "logit_bias": {5: 1.0}, "bad_words": two} for two in words]
    rows = Rows(parameters, vocab, engine)
    for _ in range(2):  # a step can be repeated
        sampled = rows.sample(logits)
        assert sampled.token_ids.tolist() == [rows.plain(i, logits[i], each)[0] for i, each in enumerate(parameters)]
        assert [int(i) for i in sampled.token_ids == best] == [0, 1, 0]
        assert sampled.logprobs[0][0].top[0][0] == best[0]  # of the model's own distribution
    rows.table.token_ids[0, NUM_TOKENS] = rows.table.token_ids[2, NUM_TOKENS] = 0
    rows.table.num_tokens[:] += 1
    assert rows.sample(logits).token_ids.tolist() == best


@pytest.mark.parametrize("limit", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(engine: NativeKernels, limit: dict[str, Any]) -> None:
    vocab, count = 12, 6000
    logits = torch.linspace(-1.5, 1.5, vocab)
    shares = torch.softmax(logits.double() / 0.8, -1)
    if "top_k" in limit:
        shares[:-6] = 0
    if "top_p" in limit:
        shares[shares.flip(0).cumsum(0).flip(0) - shares >= 0.8] = 0
    if "min_p" in limit:
        shares[shares < 0.2 * shares.max()] = 0
    expected = (shares / shares.sum() * count).numpy()
    parameters = [{"temperature": 0.8, "seed": seed, **limit} for seed in range(count)]
    tokens = Rows(parameters, vocab, engine).sample(logits.expand(count, -1)).token_ids
    observed = np.bincount(tokens, minlength=vocab)
    assert not observed[expected == 0].any()
    kept = expected > 0
    chi_square = float(((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi_square < 35  # 11 degrees of freedom or fewer: by chance once in 4000, and the seeds are fixed


@pytest.mark.parametrize("temperature", [1e20, 3e38, 1e39, float("inf")])
def test_at_the_highest_temperatures_all_tokens_are_equally_likely(engine: NativeKernels, temperature: float) -> None:
    vocab, count = 12, 3000
    logits = torch.linspace(-9, 9, vocab).expand(count, -1)
    parameters = [{"temperature": temperature, "seed": seed} for seed in range(count)]
    tokens = Rows(parameters, vocab, engine).sample(logits).token_ids
    assert tokens.tolist() == Rows(parameters, vocab, None).sample(logits).token_ids.tolist()
    expected = count / vocab
    chi_square = float(((np.bincount(tokens, minlength=vocab) - expected) ** 2 / expected).sum())
    assert chi_square < 35  # 11 degrees of freedom: by chance once in 4000, and the seeds are fixed


@pytest.mark.parametrize("temperature", [1e6, 1e9, 1e30])
def test_no_temperature_makes_a_forbidden_token_possible(engine: NativeKernels, temperature: float) -> None:
    """By a mask, and as a bad word of one token or of several."""
    vocab, count = 12, 300
    tail = Rows([{}], vocab, None).table.token_ids[0, NUM_TOKENS - 1 : NUM_TOKENS].tolist()
    limits: list[dict[str, Any]] = [
        {"allowed_token_ids": (3, 7)},
        {"logit_bias": dict.fromkeys((*range(3), *range(4, 7), *range(8, vocab)), BANNED_BIAS)},
        {"bad_words": tuple((*tail, token_id) for token_id in range(vocab) if token_id not in (3, 7))},
    ]
    masks = TokenMasks(np.array([0] * count, np.int32), only([3, 7], vocab)[None])
    logits = torch.linspace(-9, 9, vocab).expand(count, -1)
    for number, limit in enumerate(limits):
        parameters = [{"temperature": temperature, "seed": seed, **limit} for seed in range(count)]
        for native in (engine, None):
            rows = Rows(parameters, vocab, native)
            rows.table.token_ids[:, NUM_TOKENS - 1] = tail[0]
            chosen = np.arange(count, dtype=np.int32)
            sampled = rows.sampler.sample(
                chosen, rows.table.num_tokens[chosen], logits, rows.table, masks if number == 0 else None
            )
            assert set(sampled.token_ids.tolist()) == {3, 7}


def test_a_sample_does_not_depend_on_neighbours_or_threads(engine: NativeKernels) -> None:
    rng, vocab = np.random.default_rng(5), 5000
    parameters = [random_parameters(rng, vocab, largest_top_p=0.99999, most_logprobs=900) for _ in range(40)]
    logits = make_logits("usual", 40, vocab)
    together = Rows(parameters, vocab, engine).sample(logits)
    for num_threads in (1, 3):
        other = NativeKernels(engine.library, num_threads)
        rows = Rows(parameters, vocab, other)
        assert rows.sample(logits).token_ids.tolist() == together.token_ids.tolist()
        for row in range(40):
            alone = rows.sample(logits[row : row + 1], [row])
            assert alone.token_ids[0] == together.token_ids[row]
            assert alone.logprobs.get(row) == together.logprobs.get(row)
        other.close()


def test_equal_logits_go_to_the_lowest_id(engine: NativeKernels) -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [700, 300, 999]] = 2.0
    logits[0, [10, 20]] = -0.0
    sampled = Rows([{"temperature": 0.0, "logprobs": 6}], 1000, engine).sample(logits)
    assert sampled.token_ids.tolist() == [300]
    assert [token_id for token_id, _ in sampled.logprobs[0][0].top] == [300, 700, 999, 0, 1, 2]
    assert sampled.logprobs[0][0].rank == 1


@pytest.mark.parametrize("broken", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("edits", [{}, {"logit_bias": {5: 1.0}, "min_tokens": 9, "stop_token_ids": (77,)}])
def test_a_broken_row_gets_an_error_and_the_others_go_on(
    engine: NativeKernels, broken: float, edits: dict[str, Any]
) -> None:
    parameters: list[dict[str, Any]] = [{"temperature": t, "logprobs": 2, **edits} for t in (0.0, 0.0, 1.0, 1.0)]
    logits = make_logits("usual", 4, 300)
    healthy = Rows(parameters, 300, engine).sample(logits)
    logits[[1, 3], 77] = broken
    sampled = Rows(parameters, 300, engine).sample(logits)
    assert sampled.errors == {1: BROKEN_LOGITS, 3: BROKEN_LOGITS}
    assert sampled.logprobs.keys() == {0, 2}
    assert sampled.token_ids.tolist() == [healthy.token_ids[0], NO_TOKEN, healthy.token_ids[2], NO_TOKEN]


def test_logits_are_read_at_any_stride_and_left_alone(engine: NativeKernels) -> None:
    parameters: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "logit_bias": {7: 3.0}}]
    padded = torch.full((2, 700), torch.inf)
    padded[:, :500] = make_logits("usual", 2, 500)
    before = padded.clone()
    sampled = Rows(parameters, 500, engine).sample(padded)
    assert sampled.token_ids.tolist() == Rows(parameters, 500, None).sample(padded).token_ids.tolist()
    assert not sampled.errors
    assert torch.equal(padded, before)


def test_positions_of_a_row_see_the_tokens_before_them_alone(engine: NativeKernels) -> None:
    parameters: list[dict[str, Any]] = [{"temperature": 0.9, "seed": 4, "frequency_penalty": 1.0, "logprobs": 1}]
    logits = make_logits("flat", 1, 40).expand(3, -1)
    rows, positions = np.zeros(3, np.int32), np.arange(NUM_TOKENS, NUM_TOKENS + 3, dtype=np.int32)
    native, reference = Rows(parameters, 40, engine), Rows(parameters, 40, None)
    found = native.sampler.sample(rows, positions, logits, native.table)
    expected = reference.sampler.sample(rows, positions, logits, reference.table)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert [entry.token_id for entry in found.logprobs[0]] == found.token_ids.tolist()


def test_a_row_is_free_of_its_last_request(engine: NativeKernels) -> None:
    rows = Rows([{"temperature": 0.0, "logit_bias": {5: 100.0}, "logprobs": 1}], 50, engine)
    logits = make_logits("usual", 1, 50)
    assert rows.sample(logits).token_ids[0] == 5
    rows.sampler.remove_row(0)
    rows.sampler.add_row(
        0, InferRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(temperature=0.0))
    )
    sampled = rows.sample(logits)
    assert sampled.token_ids[0] == int(logits.argmax())
    assert not sampled.logprobs
