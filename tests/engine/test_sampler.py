"""The vectorised sampler does what the plain one does, row by row, independent of the rest of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.sampling.rows import uniform
from llmbackend.engine.sampling.torch_sampling import Limits, TorchSampler, draw, draw_limited, likeliest, most_likely
from llmbackend.engine.step import RowTable, SampledTokens
from llmbackend.testing.mock_model import _draw as plain_draw
from llmbackend.testing.mock_model import sample as plain_sample

VOCAB, EOS = 3000, (7, 8)


def make_logits(rows: int, seed: int = 0, spread: float = 3.0, ties: bool = False) -> torch.Tensor:
    normal = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return spread * ((normal * 2).round() / 2 if ties else normal)


def request(prompt: list[int], **sampling: Any) -> InferRequest:
    return InferRequest(request_id="r", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling))


class Rows:
    """A sampler and a table with one row per request; `outputs` are tokens generated before."""

    def __init__(self, requests: list[InferRequest], outputs: list[list[int]]) -> None:
        self.table = RowTable(len(requests), 64, 16)
        self.sampler = TorchSampler(len(requests), VOCAB, EOS)
        for row, (each, output) in enumerate(zip(requests, outputs, strict=True)):
            tokens = [*each.prompt_token_ids, *output]
            self.table.token_ids[row, : len(tokens)] = tokens
            self.table.num_tokens[row] = len(tokens)
            self.table.num_prompt_tokens[row] = len(each.prompt_token_ids)
            self.sampler.add_row(row, each)

    def sample(self, logits: torch.Tensor, rows: list[int] | None = None) -> SampledTokens:
        chosen = np.arange(len(logits)) if rows is None else np.array(rows)
        return self.sampler.sample(chosen.astype(np.int32), self.table.num_tokens[chosen], logits, self.table)


def plain(each: InferRequest, output: list[int], logits: torch.Tensor) -> Any:
    tokens = np.array([*each.prompt_token_ids, *output], np.int32)
    return plain_sample(logits.double().numpy(), tokens, len(each.prompt_token_ids), each.sampling, EOS)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_limited_draws_equal_the_plain_sampler(spread: float, ties: bool) -> None:
    cases = [(k, p, m) for k in (0, 1, 5, 1500) for p in (0.1, 0.9, 0.999, 1.0) for m in (0.0, 0.02, 0.9)]
    logits = make_logits(len(cases), spread=spread, ties=ties)
    uniforms = torch.from_numpy(np.random.default_rng(1).random(len(cases)))
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cases, strict=True))
    drawn = draw_limited(logits, uniforms, Limits(top_k, top_p.double(), min_p.double()))
    for i, (k, p, m) in enumerate(cases):
        expected = plain_draw(logits[i].double().numpy(), SamplingParams(top_k=k, top_p=p, min_p=m), float(uniforms[i]))
        assert drawn[i] == expected, cases[i]


def test_unlimited_draw_inverts_the_distribution_function() -> None:
    logits = make_logits(200)
    uniforms = torch.from_numpy(np.random.default_rng(2).random(200))
    shares = torch.softmax(logits.double(), -1).cumsum(-1)
    expected = torch.searchsorted(shares, uniforms[:, None])[:, 0]
    assert torch.equal(draw(logits, uniforms), expected)


def test_a_draw_never_takes_an_impossible_token() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, [5, 1700]] = 1.0
    nearly_one = torch.tensor([1 - 2.0**-53] * 2, dtype=torch.float64)
    assert draw(logits, nearly_one).tolist() == [1700, 1700]
    limits = Limits(torch.tensor([2, 0]), torch.tensor([1.0, 1.0]).double(), torch.tensor([0.0, 0.1]).double())
    assert draw_limited(logits, nearly_one, limits).tolist() == [1700, 1700]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, -1)
    seeds = np.full(20000, 3, np.uint64)
    uniforms = torch.from_numpy(uniform(seeds, np.arange(20000, dtype=np.uint64)))
    shares = torch.bincount(draw(logits, uniforms), minlength=4) / 20000
    torch.testing.assert_close(shares, torch.softmax(logits[0], -1), atol=0.012, rtol=0)


def test_uniforms_depend_on_seed_and_position_alone_and_look_uniform() -> None:
    seeds, positions = (grid.ravel().astype(np.uint64) for grid in np.meshgrid(np.arange(100), np.arange(100)))
    numbers = uniform(seeds, positions)
    assert (uniform(seeds[40:41], positions[40:41]) == numbers[40]).all()
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.histogram(numbers, 10, (0, 1))[0] == pytest.approx(1000, abs=150)
    grid = numbers.reshape(100, 100)
    for neighbours in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(neighbours[0].ravel(), neighbours[1].ravel())[0, 1]) < 0.05


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 256)
    logits[1, [77, 200]] = 1.0
    logits[2, 130] = float("nan")
    peaks, ids = likeliest(logits)
    assert ids.tolist() == [0, 77, 130]
    assert torch.isnan(peaks[2])
    assert torch.equal(likeliest(logits[:2, :255])[1], ids[:2])
    assert most_likely(logits[1:2], 2)[1].tolist() == [[77, 200]]


GREEDY_EDITS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {11: 100.0, 12: -3.0}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4, "presence_penalty": 1.5},
    {"frequency_penalty": 2.0},
    {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    {"min_tokens": 20, "stop_token_ids": (9,), "logit_bias": {7: 90.0, 9: 95.0}},
    {"min_tokens": 20, "ignore_eos": True, "logit_bias": {7: 90.0}},
    {"min_tokens": 2, "logit_bias": {8: 90.0}},
]


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e308])
def test_an_extreme_penalty_overflows_nothing(penalty: float, temperature: float) -> None:
    each = request([1, 2, 3], repetition_penalty=penalty, temperature=temperature, seed=5)
    logits = make_logits(1)
    for chosen in (int(Rows([each], [[4]]).sample(logits).token_ids[0]), plain(each, [4], logits[0])[0]):
        assert (chosen in (1, 2, 3, 4)) == (penalty < 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edited_greedy_rows_equal_the_plain_sampler(dtype: torch.dtype) -> None:
    logits = make_logits(len(GREEDY_EDITS), seed=4).to(dtype)
    best = logits.float().topk(6).indices.tolist()
    requests = [request(b[:2], temperature=0.0, **edit) for b, edit in zip(best, GREEDY_EDITS, strict=True)]
    outputs = [[b[2], b[2], b[3]] for b in best]
    tokens = Rows(requests, outputs).sample(logits).token_ids.tolist()
    expected = [plain(r, o, row.float())[0] for r, o, row in zip(requests, outputs, logits, strict=True)]
    assert tokens == expected


def test_bad_words_are_not_completed_by_torch_either() -> None:
    logits = make_logits(2, seed=4)
    best = logits.argmax(-1).tolist()
    bad = {"temperature": 0.0, "bad_words": ((2, 9, best[0]), (9, 9, best[0]))}
    requests = [request([1, 2], **bad), request([1, 9], **bad)]
    tokens = Rows(requests, [[9], [8]]).sample(logits).token_ids.tolist()
    assert tokens == [plain(requests[0], [9], logits[0])[0], best[1]]
    assert tokens[0] != best[0]


def mixed_requests() -> list[InferRequest]:
    return [
        request([1, 2], temperature=0.0),
        request([3], temperature=0.8, seed=1, top_p=0.9, logprobs=2),
        request([4, 5, 6], temperature=1.0, seed=2),
        request([1], temperature=1.3, seed=-3, top_k=40, repetition_penalty=1.2),
        request([9, 9], temperature=0.7, seed=1 << 70, min_p=0.05, logit_bias={3: 4.0}),
        request([2], temperature=1e-6, seed=5, logprobs=0),
        request([2, 8], temperature=1.0, seed=5, presence_penalty=0.5, min_tokens=9),
    ]


def test_a_row_does_not_depend_on_its_neighbours_and_a_step_can_be_repeated() -> None:
    requests, logits = mixed_requests(), make_logits(7, seed=6)
    rows = Rows(requests, [[i, 4] for i in range(7)])
    together = rows.sample(logits)
    assert rows.sample(logits).token_ids.tolist() == together.token_ids.tolist()
    for i in range(7):
        alone = rows.sample(logits[i : i + 1], [i])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs.get(i) == together.logprobs.get(i)


def test_a_later_position_draws_anew() -> None:
    requests, logits = [request([1], temperature=1.0, seed=4)] * 12, make_logits(1, spread=1.0).expand(12, -1)
    tokens = Rows(requests, [[2] * i for i in range(12)]).sample(logits).token_ids.tolist()
    assert len(set(tokens)) > 6


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    requests = [
        request([1, 2], temperature=0.0, logprobs=3, logit_bias={5: 50.0}),
        request([1], temperature=1.5, seed=3, top_k=5, logprobs=0),
        request([3], temperature=0.0),
    ]
    logits = make_logits(3, seed=8)
    sampled = Rows(requests, [[], [], []]).sample(logits)
    assert set(sampled.logprobs) == {0, 1}
    assert sampled.token_ids[0] == 5
    for row in (0, 1):
        (found,), shares = sampled.logprobs[row], torch.log_softmax(logits[row].double(), -1)
        assert found.token_id == sampled.token_ids[row]
        assert found.logprob == pytest.approx(shares[found.token_id].item(), abs=1e-4)
        assert found.rank == int((shares > shares[found.token_id]).sum()) + 1
    expected = torch.log_softmax(logits[0].double(), -1).topk(3)
    assert [token_id for token_id, _ in sampled.logprobs[0][0].top] == expected.indices.tolist()
    assert [logprob for _, logprob in sampled.logprobs[0][0].top] == pytest.approx(expected.values.tolist(), abs=1e-4)
    assert sampled.logprobs[1][0].top == ()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_gets_an_error_and_the_others_go_on(broken: float) -> None:
    requests, logits = mixed_requests(), make_logits(7, seed=6)
    healthy = Rows(requests, [[]] * 7).sample(logits)
    logits[[1, 5], 1234] = broken
    sampled = Rows(requests, [[]] * 7).sample(logits)
    assert set(sampled.errors) == {1, 5}
    assert "not finite" in sampled.errors[1]
    assert not sampled.logprobs
    for i in (0, 2, 3, 4, 6):
        assert sampled.token_ids[i] == healthy.token_ids[i]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "'logit_bias' names token 3000, expected one from 0 to 2999"),
        ({"logit_bias": {-1: 1.0}}, "'logit_bias' names token -1"),
        ({"logit_bias": {5: float("inf")}}, "'logit_bias' of token 5 is inf, expected a finite number"),
        ({"logprobs": VOCAB + 1}, "'logprobs' is 3001, expected 0 to 3000"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchSampler(1, VOCAB, EOS).add_row(0, request([1], **sampling))


def test_a_row_is_free_of_its_last_request() -> None:
    rows = Rows([request([1], temperature=0.0, logit_bias={5: 100.0}, logprobs=1)], [[]])
    logits = make_logits(1)
    assert rows.sample(logits).token_ids[0] == 5
    rows.sampler.remove_row(0)
    rows.sampler.add_row(0, request([1], temperature=0.0))
    sampled = rows.sample(logits)
    assert sampled.token_ids[0] == int(logits.argmax())
    assert not sampled.logprobs
