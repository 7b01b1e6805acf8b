"""Sampling on the device chooses what the CPU's sampler chooses, for each row alone, and never waits for a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from llmbackend.engine.gpu import device_sampler
from llmbackend.engine.gpu.device_sampler import DeviceSampler, tokens_on_host
from llmbackend.engine.gpu.kernels import ranked_sampling, ranking, sampling
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.sampling.rows import uniform
from llmbackend.engine.sampling.torch_sampling import TorchSampler
from llmbackend.engine.step import BROKEN_LOGITS, NO_TOKEN, RowTable, SampledTokens
from llmbackend.engine.token_masks import TokenMasks, only
from tests.helpers.gpu.kernel_device import DEVICE, INTERPRETED
from tests.helpers.sampling_parameters import random_parameters

EOS, NUM_PROMPT, NUM_TOKENS = (3, 4), 5, 9
KINDS = ("flat", "usual", "peaked", "equal", "with minus infinities")


class Rows:
    """Both samplers, and a table with one row for each set of parameters; the rows' tokens are drawn once."""

    def __init__(self, parameters: list[dict[str, Any]], vocab: int) -> None:
        count = len(parameters)
        self.table = RowTable(count, 16, 16)
        self.table.token_ids[:] = np.random.default_rng(1).integers(0, vocab, self.table.token_ids.shape)
        self.table.token_ids[:, 6] = self.table.token_ids[:, 7]
        self.table.num_prompt_tokens[:], self.table.num_tokens[:] = NUM_PROMPT, NUM_TOKENS
        self.reference = TorchSampler(count, vocab, EOS)
        self.sampler = DeviceSampler(count, vocab, EOS, DEVICE)
        for row, each in enumerate(parameters):
            prompt = tuple(self.table.token_ids[row, :NUM_PROMPT].tolist())
            request = InferRequest(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**each))
            self.reference.add_row(row, request)
            self.sampler.add_row(row, request)

    def tensors(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        chosen = np.array(rows, np.int32)
        table = self.table
        arrays = (chosen, table.num_tokens[np.maximum(chosen, 0)], table.token_ids, table.num_prompt_tokens)
        return tuple(torch.from_numpy(array).to(DEVICE) for array in arrays)

    def sample(
        self, logits: torch.Tensor, rows: list[int] | None = None, masks: TokenMasks | None = None
    ) -> SampledTokens:
        tensors = self.tensors(list(range(len(logits))) if rows is None else rows)
        prepared = self.sampler.prepare(masks=masks)
        prepared.complete()
        samples = [tensor.cpu() for tensor in prepared.sample(logits.to(DEVICE), *tensors)]
        return tokens_on_host(tensors[0].cpu().numpy(), samples)

    def expected(self, logits: torch.Tensor, masks: TokenMasks | None = None) -> SampledTokens:
        rows = np.arange(len(logits), dtype=np.int32)
        return self.reference.sample(rows, self.table.num_tokens[rows], logits, self.table, masks)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that a small vocabulary is searched like a large one."""
    if not INTERPRETED:
        return  # what is compiled stays; the test takes a larger vocabulary
    for module in (ranking, ranked_sampling, device_sampler):
        monkeypatch.setattr(module, "CANDIDATES", tl.constexpr(32))


def make_logits(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    normal = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab + seed))
    if kind == "equal":
        return torch.full((rows, vocab), -2.5)
    if kind == "with minus infinities":
        return torch.where(normal < 1.5, torch.tensor(-torch.inf), normal).index_fill(1, torch.tensor([5]), 0.1)
    return normal * {"flat": 0.01, "usual": 3.0, "peaked": 12.0}[kind]


def assert_same(found: SampledTokens, expected: SampledTokens) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.errors == expected.errors
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, (theirs,) in expected.logprobs.items():
        (ours,) = found.logprobs[row]
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-5, abs=1e-5)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "vocab", "dtype"),
    [
        ("flat", 600, torch.bfloat16),
        ("with minus infinities", 257, torch.float16),
        ("usual", 1500, torch.float32),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_cpu(kind: str, vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    count, vocab = (3, vocab) if INTERPRETED else (500, 60 * vocab)
    rows = Rows([random_parameters(rng, vocab, largest_top_p=0.9999, most_logprobs=300) for _ in range(count)], vocab)
    logits = make_logits(kind, count, vocab + 3).to(dtype)
    assert_same(rows.sample(logits), rows.expected(logits))


SIZE = 1 if INTERPRETED else 100
LIMITS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 200 * SIZE, "top_p": 0.7, "min_p": 1e-5, "logprobs": 90 * SIZE},
    {"top_k": 150 * SIZE, "min_p": 1e-4, "logprobs": 20 * SIZE},
]


@pytest.mark.usefixtures("few_candidates")
def test_masked_tokens_are_those_of_the_cpu() -> None:
    """Logprobs stay those of the raw distribution; a block of the vocabulary may have no token left."""
    vocab, allowed_token_ids = 1200, [tuple(range(i, 1200, step)) for i, step in ((7, 1200), (3, 400), (1, 2), (0, 1))]
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 4, "presence_penalty": 0.5}]
    parameters = [
        {"seed": i, "logprobs": 2, "allowed_token_ids": allowed_token_ids[i // 4], **ways[i % 4]} for i in range(16)
    ]
    words = np.stack([only(token_ids, vocab) for token_ids in allowed_token_ids])
    index = np.array([i // 4 if i % 5 else -1 for i in range(16)], np.int32)
    rows, masks = Rows(parameters, vocab), TokenMasks(index, words)
    logits = make_logits("usual", 16, vocab)
    found = rows.sample(logits, masks=masks)
    assert_same(found, rows.expected(logits, masks))
    assert all(found.token_ids[i] in allowed_token_ids[i // 4] for i in range(16) if i % 5)


def test_more_candidates_than_there_is_room_for() -> None:
    rows = Rows([{"temperature": 1.5, "seed": 3, **limit} for limit in LIMITS], 400 * SIZE)
    logits = make_logits("flat", len(LIMITS), 400 * SIZE).bfloat16()
    logits[1] = 1.5
    assert_same(rows.sample(logits), rows.expected(logits))


def test_numbers_are_those_of_the_host() -> None:
    rng = np.random.default_rng(4)
    seeds = rng.integers(0, 2**64, 300, np.uint64)
    positions = rng.integers(0, 2**31, 300).astype(np.int32)
    found = torch.full((300,), float("nan"), dtype=torch.float64, device=DEVICE)
    arguments = (torch.from_numpy(array).to(DEVICE) for array in (seeds.view(np.int64), positions))
    numbers_kernel[(1,)](*arguments, found, 300, TILE=512)
    assert (found.cpu().numpy() == uniform(seeds, positions.astype(np.uint64))).all()


@triton.jit  # type: ignore[untyped-decorator]
def numbers_kernel(seeds, positions, out, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.arange(0, TILE)
    mask = places < count
    position = tl.load(positions + places, mask=mask, other=0)
    tl.store(out + places, sampling.uniform(tl.load(seeds + places, mask=mask, other=0), position), mask=mask)


def test_plain_rows_are_those_of_the_cpu() -> None:
    parameters = [{"temperature": 0.4 + row % 3, "seed": row} for row in range(8)]
    for kind in ("flat", "with minus infinities"):
        rows, logits = Rows(parameters, 700), make_logits(kind, 8, 700)
        assert_same(rows.sample(logits), rows.expected(logits))


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    launched: list[str] = []
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    return launched


LIMITED = {"choose_pivots_kernel", "measure_splits_kernel", "collect_bins_kernel", "draw_limited_kernel"}


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter runs")
def test_a_plain_step_is_two_launches_and_only_what_is_asked_for_adds_some(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = count_launches(monkeypatch)
    plain: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 2}, {"temperature": 0.0}]
    logits = make_logits("usual", 3, 40)
    for extra, more in (({}, set()), ({"top_k": 3}, LIMITED), ({"logprobs": 1}, {"logprobs_kernel"})):
        launched.clear()
        rows = Rows([*plain[:2], {"temperature": 1.0, **extra}], 40)
        rows.sample(logits)
        assert sorted(launched) == sorted(["summarise_kernel", "choose_kernel", *more])


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2, "frequency_penalty": 0.7, "logit_bias": {3: 4.0}},
    {"temperature": 1.3, "seed": -3, "top_k": 40, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 9, "presence_penalty": 1.0, "stop_token_ids": (20,)},
]


def test_a_sample_does_not_depend_on_its_neighbours_and_a_step_can_be_repeated() -> None:
    rows, logits = Rows(MIXED, 300), make_logits("usual", 5, 300)
    together = rows.sample(logits)
    for row in (2, 3):
        alone = rows.sample(logits[row : row + 1], [row])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs.get(row) == together.logprobs.get(row)


def test_a_row_with_drafts_is_sampled_several_times() -> None:
    """More samples change their logits than there are rows."""
    rows, sampled_rows = Rows(MIXED, 300), np.array([2, 2, 2, 0, 4, 4, 3, 3, 1], np.int32)
    positions = NUM_TOKENS + np.array([0, 1, 2, 0, 0, 1, 0, 1, 0], np.int32)
    logits = make_logits("usual", len(sampled_rows), 300)
    expected = rows.reference.sample(sampled_rows, positions, logits, rows.table)
    tensors = [torch.from_numpy(array).to(DEVICE) for array in (sampled_rows, positions)]
    prepared = rows.sampler.prepare(sampled_rows)
    samples = prepared.sample(logits.to(DEVICE), *tensors, *rows.tensors([])[2:])
    found = tokens_on_host(sampled_rows, [tensor.cpu() for tensor in samples])
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for row, count in ((0, 1), (3, 2)):
        ours, theirs = found.logprobs[row], expected.logprobs[row]
        assert len(ours) == len(theirs) == count
        assert [(one.token_id, one.rank) for one in ours] == [(one.token_id, one.rank) for one in theirs]


def test_padding_samples_nothing_and_changes_no_other_row() -> None:
    rows, logits = Rows(MIXED[2:3] + MIXED[:1], 300), make_logits("usual", 4, 300)
    expected = rows.expected(logits[:2])
    logits[2], logits[3] = 1.0, torch.nan
    tensors = rows.tensors([0, 1, 0, -1])
    token_ids = rows.sampler.prepare().sample(logits.to(DEVICE), *tensors)[0]
    assert token_ids.tolist() == [*expected.token_ids.tolist(), NO_TOKEN, NO_TOKEN]
    assert len(rows.sampler.prepare().sample(logits[:0].to(DEVICE), *rows.tensors([]))[0]) == 0


def test_a_broken_row_gets_an_error_and_the_others_go_on() -> None:
    rows, logits = Rows([*MIXED[2:], *MIXED[:1]], 300), make_logits("usual", 4, 300)
    logits[0, 277], logits[1], logits[3, 5] = torch.nan, -torch.inf, torch.inf
    sampled = rows.sample(logits)
    assert sampled.errors == {0: BROKEN_LOGITS, 1: BROKEN_LOGITS, 3: BROKEN_LOGITS}
    assert_same(sampled, rows.expected(logits))


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 400)
    logits[0, [399, 300, 301]] = 2.0
    logits[0, [10, 20]] = -0.0
    sampled = Rows([{"temperature": 0.0, "logprobs": 6}], 400).sample(logits)
    assert sampled.token_ids.tolist() == [300]
    assert [token_id for token_id, _ in sampled.logprobs[0][0].top] == [300, 301, 399, 0, 1, 2]
    assert sampled.logprobs[0][0].rank == 1


def test_logits_are_read_at_any_stride_and_left_alone() -> None:
    rows = Rows([{"temperature": 0.0}, {"temperature": 1.0, "logit_bias": {7: 3.0}, "logprobs": 1}], 300)
    padded = torch.full((2, 400), torch.inf)
    padded[:, :300] = make_logits("usual", 2, 300)
    before = padded.clone()
    assert_same(rows.sample(padded), rows.expected(padded))
    assert torch.equal(padded, before)


def test_extremes_leave_a_greedy_choice() -> None:
    parameters: list[dict[str, Any]] = [
        {"temperature": 1e-4},
        {"temperature": 1.0, "logit_bias": {9: 3.3e38}},
        {"temperature": 0.0, "repetition_penalty": 1e300},
    ]
    rows, logits = Rows(parameters, 300), make_logits("usual", 3, 300)
    logits[0] *= 1e36
    logits[1, 9] = 3.3e38
    with np.errstate(over="ignore", invalid="ignore"):
        token_ids = rows.sample(logits).token_ids.tolist()
    assert token_ids[:2] == [int(logits[0].argmax()), 9]
    assert token_ids[2] not in rows.table.token_ids[2, :NUM_TOKENS]


def test_what_a_row_asks_for_is_what_it_asked_for_when_the_step_was_prepared() -> None:
    rows, logits = Rows([{"temperature": 0.0, "logit_bias": {5: 100.0}}], 50), make_logits("usual", 1, 50)
    prepared = rows.sampler.prepare()
    rows.sampler.remove_row(0)
    rows.sampler.add_row(0, request(temperature=0.0))
    later = rows.sampler.prepare()
    tensors, expected = rows.tensors([0]), int(logits.argmax())
    logits = logits.to(DEVICE)
    assert prepared.sample(logits, *tensors)[0].tolist() == [5]
    assert later.sample(logits, *tensors)[0].tolist() == [expected]


def test_a_step_that_was_given_up_loses_nothing() -> None:
    rows, logits = Rows([{"temperature": 0.0, "logit_bias": {5: 100.0}}], 50), make_logits("usual", 1, 50)
    rows.sampler.prepare()
    rows.sampler.prepare()
    assert rows.sample(logits).token_ids.tolist() == [5]


def request(**sampling: Any) -> InferRequest:
    return InferRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {50: 1.0}}, "'logit_bias' names token 50, expected one from 0 to 49"),
        ({"logit_bias": {5: float("inf")}}, "'logit_bias' of token 5 is inf, expected a finite number"),
        ({"logprobs": 51}, "'logprobs' is 51, expected 0 to 50"),
        (
            {"bad_words": ((1, 2),)},
            "'bad_words' contains a word of several tokens, expected single-token words on a GPU",
        ),
    ],
)
def test_a_bad_parameter_is_refused_by_name(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceSampler(1, 50, EOS, DEVICE).add_row(0, request(**sampling))


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter runs")
def test_all_that_steps_launch_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = DeviceSampler(1, 6, EOS, DEVICE)
    launched = count_launches(monkeypatch)
    assert sampler.is_unused
    logits, rows = torch.zeros(1, 6), torch.zeros(1, dtype=torch.int32)
    tables = torch.ones(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    sampler.compile(logits, *tables)
    assert {"choose_kernel", *LIMITED, "edit_kernel", "mask_kernel", "logprobs_kernel"} <= set(launched)
    assert not sampler.is_unused
    launched.clear()
    sampler.prepare().sample(logits, rows, rows, *tables)
    assert launched == ["summarise_kernel", "choose_kernel"]
