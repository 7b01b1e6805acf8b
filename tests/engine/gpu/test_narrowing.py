"""Draws with limits from flat rows: many programs of a row find where it ends, and the token is the one of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from llmbackend.engine.gpu import device_sampler
from llmbackend.engine.gpu.kernels import narrowing, ranked_sampling, ranking
from tests.engine.gpu.test_device_sampler import Rows, assert_same, make_logits
from tests.helpers.gpu.counted_reads import counted_reads
from tests.helpers.gpu.kernel_device import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="small sizes stand for large ones")

VOCAB = 3000
WAYS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 0.7},
    {"top_k": 30, "top_p": 0.6},
    {"min_p": 1e-4, "top_p": 0.7, "temperature": 2.0},
    {"top_k": 900, "top_p": 0.8},
]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With which a vocabulary of 3000 has twelve splits and 16 bins."""
    for name, size in (("TOKENS_PER_BIN", 200), ("ROOM", 512), ("SPLIT_BLOCKS", 1), ("RANKING_PROGRAMS", 1)):
        monkeypatch.setattr(narrowing, name, size)
    for name in ("_CHUNK", "_OTHERS"):  # as large as they may be: the interpreter takes its time for each
        monkeypatch.setattr(narrowing, name, tl.constexpr(256))
    for module in (ranking, ranked_sampling, device_sampler):
        monkeypatch.setattr(module, "CANDIDATES", tl.constexpr(32))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The plans that draws were made by."""
    seen: list[list[int]] = []
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__name__ == "draw_limited_kernel":
            seen.extend(args[9].tolist())
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return seen


def num_ready(plans: list[list[int]]) -> int:
    return sum(plan[narrowing.IS_READY.value] for plan in plans)


def rows_of(ways: list[dict[str, Any]]) -> Rows:
    return Rows([{"temperature": 1.0, "seed": seed, **way} for seed, way in enumerate(ways)], VOCAB)


@pytest.mark.parametrize("kind", ["flat", "usual", "equal"])
def test_tokens_are_those_of_the_cpu(kind: str, plans: list[list[int]]) -> None:
    rows, logits = rows_of(WAYS), make_logits(kind, len(WAYS), VOCAB).bfloat16()
    assert_same(rows.sample(logits), rows.expected(logits))
    if kind in ("flat", "equal"):  # all but that whose top_k ends beyond the first bin
        assert num_ready(plans) >= len(WAYS) - 2


def test_draws_all_over_the_order_are_those_of_the_cpu(plans: list[list[int]]) -> None:
    """The drawn token is in the first bin, in one between, in that where the kept ones end; float32 copies."""
    ways: list[dict[str, Any]] = [{"top_p": 0.4 + 0.1 * i, "logit_bias": {i: 0.5}} for i in range(6)]
    rows, logits = rows_of(ways), make_logits("flat", 6, VOCAB)
    assert_same(rows.sample(logits), rows.expected(logits))
    assert num_ready(plans) >= 5
    assert len({plan[narrowing.DRAWN_BIN.value] for plan in plans}) >= 3


def test_a_bin_that_finds_no_room_is_searched_by_one_program(
    monkeypatch: pytest.MonkeyPatch, plans: list[list[int]]
) -> None:
    monkeypatch.setattr(narrowing, "ROOM", 32)
    rows, logits = rows_of(WAYS[:2]), make_logits("flat", 2, VOCAB)
    assert_same(rows.sample(logits), rows.expected(logits))
    assert num_ready(plans) == 0


def test_numbers_of_programs_change_nothing(monkeypatch: pytest.MonkeyPatch, plans: list[list[int]]) -> None:
    """Not even the plans, bit by bit; larger splits add up masses in another order, and give the same tokens."""
    ways, logits = WAYS[:2], make_logits("flat", 2, VOCAB).bfloat16()
    expected = rows_of(ways).sample(logits).token_ids.tolist()
    first = list(plans)
    monkeypatch.setattr(narrowing, "SPLITS_TO_COLLECT", 5)
    monkeypatch.setattr(narrowing, "RANKING_PROGRAMS", 4)
    plans.clear()
    assert rows_of(ways).sample(logits).token_ids.tolist() == expected
    assert [written(plan) for plan in plans] == [written(plan) for plan in first]
    monkeypatch.setattr(narrowing, "SPLIT_BLOCKS", 4)
    assert rows_of(ways).sample(logits).token_ids.tolist() == expected


def written(plan: list[int]) -> list[int]:
    return plan[: narrowing.PLAN_WORDS - 1] if plan[narrowing.IS_READY.value] else plan[:1]


def test_other_rows_change_nothing(plans: list[list[int]]) -> None:
    rows, logits = rows_of(WAYS[:3]), make_logits("flat", 3, VOCAB)
    together = rows.sample(logits).token_ids.tolist()
    of_all = list(plans)
    plans.clear()
    assert rows.sample(logits[2:], [2]).token_ids.tolist() == together[2:]
    assert written(plans[0]) == written(of_all[2])


def test_no_program_reads_much_of_a_flat_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of real vocabularies; one program alone took some twenty passes over the row."""
    monkeypatch.undo()
    for name in ("_CHUNK", "_OTHERS"):
        monkeypatch.setattr(narrowing, name, tl.constexpr(512))
    vocab = 65536
    rows = Rows([{"temperature": 1.0, "seed": 4, "top_p": 0.95}], vocab)
    logits = make_logits("flat", 1, vocab).bfloat16()
    with counted_reads(logits) as reads:
        sampled = rows.sample(logits)
    assert_same(sampled, rows.expected(logits))
    narrowed = {key: count for key, count in reads.items() if key[0] not in ("summarise_kernel", "choose_kernel")}
    # A program that collects reads four splits of 4096, once for each of the two bins.
    assert max(narrowed.values()) <= 2 * 4 * 4096
    assert sum(narrowed.values()) <= 3.2 * vocab
    assert "draw_limited_kernel" not in {kernel for kernel, _ in narrowed}
