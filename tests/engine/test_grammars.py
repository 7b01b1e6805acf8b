"""Grammars, reasoning limits and allowed tokens inside the engine, on the mock model."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from llmbackend.engine.config import SpeculativeConfig, StructuredOutputsConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.errors import BadInputError
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import NativeKernels
from llmbackend.engine.messages import InferRequest, Reasoning, SamplingParams, Vocabulary
from llmbackend.engine.sampling.torch_sampling import TorchSampler
from llmbackend.engine.step import RowTable
from llmbackend.engine.token_masks import TokenMasks, all_tokens, num_words, only
from tests.helpers.mock_devices import devices_closed, make_overlapping
from tests.helpers.mock_engine import Outcome, Outcomes, make_core, make_request, run_counted, run_to_end
from tests.helpers.native_engines import best_is_fast

BYTES = Vocabulary(token_bytes=tuple(bytes((byte,)) for byte in range(256)))
EOS = 257
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green", "greenish"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
JSON_GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
THINK = Reasoning(start_token_ids=(60, 62), end_token_ids=(60, 47, 62), is_open=False)


def constrained(
    request_id: str, grammar: str = "", reasoning: Reasoning | None = None, **sampling: Any
) -> InferRequest:
    sampling = {"temperature": 1.0, "max_tokens": 80, "seed": sum(request_id.encode()), **sampling}
    request = make_request(request_id, request_id.encode(), **sampling)
    return msgspec.structs.replace(request, grammar=grammar, reasoning=reasoning)


def with_vocabulary(core: EngineCore) -> EngineCore:
    core.set_vocabulary(BYTES)
    return core


def run(*requests: InferRequest, **arguments: Any) -> Outcomes:
    core = with_vocabulary(make_core(**arguments))
    outcomes = run_to_end(core, requests)
    core.close()
    return outcomes


def text(outcome: Outcome) -> str:
    return bytes(token_id for token_id in outcome.token_ids if token_id < 256).decode("latin-1")


def grammars() -> dict[str, str]:
    return {
        "json": JSON_GRAMMAR,
        "regex": LLMatcher.grammar_from_regex("(ab|a[c-f]{2,5})+[0-9]{1,3}"),
        "choice": LLMatcher.grammar_from_regex("(yes|yesterday|no)"),
        "lark": 'start: "(" start ")" | /[a-z]{1,4}/',
    }


def test_a_run_of_drafts_ends_where_the_mask_leaves_no_token() -> None:
    """The grammar allows only `h` there, which allowed_token_ids does not; without a mask, `h` is the likeliest."""
    grammar = LLMatcher.grammar_from_regex("(a|A)(b|B)(c|C)(d|D)(e|E)(f|F)(g|G)h")
    request = constrained(
        "abcdefgh",
        grammar,
        temperature=0.0,
        logit_bias={**dict.fromkeys(range(97, 104), 50.0), 104: 100.0},
        allowed_token_ids=tuple(token_id for token_id in range(32, 127) if token_id != 104),
    )
    drafted = run(request, speculative_config=SpeculativeConfig(prompt_lookup_max=1)).of
    assert drafted == run(request).of


def mixed(count: int = 8) -> list[InferRequest]:
    """Constrained in all ways, and unconstrained ones between them."""
    kinds = [*grammars().values(), ""]
    requests = []
    for i in range(count):
        grammar = kinds[i % len(kinds)]
        reasoning = (
            msgspec.structs.replace(THINK, is_open=i % 4 == 1, max_tokens=(None, 0, 5)[i % 3]) if i % 2 else None
        )
        if reasoning is not None and reasoning.max_tokens is None:
            reasoning = None
        allowed = (*range(32, 127), EOS) if i % 5 == 4 else ()
        requests.append(
            constrained(f"r{i}", grammar, reasoning, allowed_token_ids=allowed, logprobs=2 if i % 3 == 0 else None)
        )
    return requests


@pytest.mark.parametrize("name", list(grammars()))
def test_what_ends_by_stop_is_accepted(name: str) -> None:
    grammar = grammars()[name]
    outcomes = run(*(constrained(f"{name}{i}", grammar) for i in range(8)))
    for request_id, outcome in outcomes.of.items():
        assert outcome.finish_reason in ("stop", "length"), (request_id, outcome.error)
        if outcome.finish_reason == "stop" and name == "json":
            assert set(json.loads(text(outcome))) == {"name", "age", "kind"}
    assert any(outcome.finish_reason == "stop" for outcome in outcomes.of.values())


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 3, "block_size": 4},
        {"num_kv_blocks": 26, "block_size": 4},
        {"enable_prefix_caching": False, "max_num_seqs": 5},
        {"structured_outputs_config": StructuredOutputsConfig(disable_jump_forward=True)},
        {"speculative_config": SpeculativeConfig(prompt_lookup_max=1, max_step_tokens=32)},
        {"speculative_config": SpeculativeConfig(prompt_lookup_max=2), "num_kv_blocks": 26, "block_size": 4},
    ],
)
def test_batch_chunks_and_preemption_do_not_change_tokens(arguments: dict[str, Any]) -> None:
    requests = mixed()
    expected, found = run(*requests), run(*requests, **arguments)
    assert found.of == expected.of


def test_forced_tokens_are_drafted() -> None:
    """So that there are fewer steps than tokens."""
    request = constrained("r", JSON_GRAMMAR)
    core = with_vocabulary(make_core())
    outcomes, stats = run_counted(core, [request])
    core.close()
    num_free = len(outcomes["r"].token_ids) - len('{"name":"","age":,"kind":""}')
    assert stats.num_steps < num_free + 8


@pytest.mark.parametrize("cut", [0, 1, 5, 16])
def test_a_restart_at_any_token_changes_nothing(cut: int) -> None:
    requests = mixed()
    expected = run(*requests)
    resumed = [
        msgspec.structs.replace(request, output_token_ids=expected[request.request_id].token_ids[:cut])
        for request in requests
        if len(expected[request.request_id].token_ids) > cut
    ]
    found = run(*resumed)
    for request in resumed:
        before, after = expected[request.request_id], found[request.request_id]
        assert request.output_token_ids + after.token_ids == before.token_ids
        assert (after.finish_reason, after.error) == (before.finish_reason, before.error)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("pace", ["fast", "slow", "drawn"])
def test_overlap_changes_nothing(in_flight: int, pace: str) -> None:
    requests = mixed()
    expected = run(*requests)
    drafting = SpeculativeConfig(prompt_lookup_max=1, max_step_tokens=32)
    num_steps = []
    with devices_closed():
        for speculation in (None, drafting):
            core = with_vocabulary(make_overlapping(pace=pace, in_flight=in_flight, speculative_config=speculation))
            found, stats = run_counted(core, requests)
            core.close()
            assert found.of == expected.of
            num_steps.append(stats.num_steps)
    assert num_steps[1] < num_steps[0] * 0.8, "forced tokens were not drafted"


def test_where_forced_tokens_leave_none_the_error_is_that_of_one_by_one() -> None:
    """The device has sampled a token behind them, which the host does not take."""
    request = constrained("r", 'start: "abc"', min_tokens=50)
    expected = run(request)
    with devices_closed():
        core = with_vocabulary(make_overlapping(speculative_config=SpeculativeConfig(max_step_tokens=32)))
        found = run_to_end(core, [request, constrained("other", 'start: "xyz"')])
        core.close()
    assert found["r"] == expected["r"]
    assert text(found["r"]) == "abc"
    assert text(found["other"]) == "xyz"


def test_rows_with_costly_masks_take_turns_and_get_the_same_tokens() -> None:
    requests = [constrained(f"r{i}", JSON_GRAMMAR) for i in range(6)]
    requests.append(constrained("free", max_tokens=60, ignore_eos=True))
    expected = run(*requests)
    core = with_vocabulary(make_core())
    for request in requests:
        core.add(request)
    outcomes, most_rows = Outcomes(), 0
    while core.has_work:
        constraints = list(core._rows.constraints.values())
        outcomes.add(result := core.step())
        if len(constraints) == 6 and len(core._rows.constraints) == 6:
            most_rows = max(most_rows, len(result.outputs))
        for constraint in core._rows.constraints.values():
            constraint.mask_s = 0.006
    core.close()
    assert outcomes.of == expected.of
    assert 1 <= most_rows <= 2


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("min_tokens", {"min_tokens": 50}),
        ("ignore_eos", {"ignore_eos": True}),
        ("allowed_token_ids", {"allowed_token_ids": (65, EOS)}),
        ("bad_words", {"logit_bias": {98: -1e9}}),
        ("bad_words", {"bad_words": ((97, 98),)}),
    ],
)
def test_where_no_token_is_left_the_error_names_both_fields(field: str, sampling: dict[str, Any]) -> None:
    other = constrained("other", 'start: "xyz"')
    outcomes = run(constrained("r", 'start: "abc"', **sampling), other)
    assert outcomes["r"].finish_reason == "error"
    assert "'structured_outputs'" in outcomes["r"].error
    assert f"'{field}'" in outcomes["r"].error
    assert text(outcomes["other"]) == "xyz"


@pytest.mark.parametrize("grammar", ["start: unknown", "{", "start: /(/"])
def test_a_grammar_that_cannot_be_compiled_is_its_own_error(grammar: str) -> None:
    outcomes = run(constrained("bad", grammar), constrained("good", 'start: "xyz"'))
    assert outcomes["bad"].finish_reason == "error"
    assert "'structured_outputs'" in outcomes["bad"].error
    assert text(outcomes["good"]) == "xyz"


def test_without_a_vocabulary_grammars_are_refused_by_name() -> None:
    core = make_core()
    outcomes = run_to_end(core, [constrained("r", 'start: "abc"'), constrained("plain", max_tokens=3)])
    core.close()
    assert "'structured_outputs'" in outcomes["r"].error
    assert len(outcomes["plain"].token_ids) == 3


def test_a_request_ends_while_its_grammar_is_compiled() -> None:
    core = with_vocabulary(make_core())
    core.add(constrained("r", JSON_GRAMMAR))
    core.abort("r")
    assert [output.finish_reason for output in core.step().outputs] == ["abort"]
    assert not core.has_work
    core.close()


def test_a_request_whose_grammar_is_compiled_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    core = with_vocabulary(make_core())
    grammar = Future[Any]()
    monkeypatch.setattr(core._constraints._compiler, "compile", lambda text: grammar)
    core.add(constrained("r", JSON_GRAMMAR))
    assert core.step().stats.num_requests_waiting == 1
    grammar.set_exception(BadInputError("it is not a grammar"))
    assert core.step().stats.num_requests_waiting == 0
    core.close()


def test_the_answer_follows_the_grammar_behind_the_reasoning() -> None:
    thinking = msgspec.structs.replace(THINK, is_open=True, max_tokens=6)
    outcome = run(constrained("r", 'start: "abc"', thinking))["r"]
    assert text(outcome)[-6:] == "</>abc"
    assert len(outcome.token_ids) == 6 + 3 + 3 + 1


def test_the_start_of_reasoning_is_allowed_beside_the_grammar() -> None:
    bias = {60: 200.0, 62: 100.0}
    outcome = run(constrained("r", 'start: "<a" | "b"', msgspec.structs.replace(THINK, max_tokens=2), logit_bias=bias))
    assert text(outcome["r"])[:2] == "<>"
    assert text(outcome["r"])[-2:] in ("<a", "/>b", ">b")
    plain = run(constrained("p", 'start: "<a" | "b"', THINK, logit_bias={60: 200.0, 97: 300.0}))
    assert text(plain["p"]) == "<a"


def test_a_budget_limits_reasoning_without_a_grammar() -> None:
    outcome = run(
        constrained(
            "r", "", Reasoning(end_token_ids=(60, 62), max_tokens=4, is_open=True), max_tokens=12, ignore_eos=True
        )
    )
    assert outcome["r"].token_ids[4:6] == (60, 62)


def test_only_allowed_tokens_are_sampled() -> None:
    outcome = run(constrained("r", allowed_token_ids=(65, 70), max_tokens=30))["r"]
    assert set(outcome.token_ids) == {65, 70}


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (constrained("r", allowed_token_ids=(259,)), "allowed_token_ids"),
        (constrained("r", "", Reasoning(end_token_ids=(), is_open=True)), "reasoning_markers"),
        (constrained("r", "", Reasoning(end_token_ids=(3,), is_open=True, max_tokens=-1)), "thinking_token_budget"),
    ],
)
def test_bad_values_are_refused_by_name(request_: InferRequest, name: str) -> None:
    assert f"'{name}'" in run(request_)["r"].error


# --- samplers ---------------------------------------------------------------------------------------------------------


def random_masks(samples: int, vocab: int, seed: int) -> TokenMasks:
    draw = np.random.default_rng(seed)
    words = np.stack([only(draw.choice(vocab, size, replace=False), vocab) for size in (1, 3, vocab // 2)])
    words = np.concatenate([words, all_tokens(vocab)[None]])
    assert words.shape[1] == num_words(vocab)
    return TokenMasks(draw.integers(-1, 4, samples).astype(np.int32), words)


@pytest.mark.skipif(not library.available(), reason="no native kernels are built")
@pytest.mark.parametrize("engine", best_is_fast(library.available() or ("none",)))
@pytest.mark.parametrize("vocab", [33, 1000, 5003])
def test_native_and_torch_apply_masks_alike(engine: str, vocab: int) -> None:
    loaded = library.load(engine)
    assert loaded is not None
    native = NativeKernels(loaded, 2)
    ways = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5, "logprobs": 2},
        {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.5},
    ]
    found = []
    samples, table = 40, RowTable(40, 16, 16)
    table.num_prompt_tokens[:], table.num_tokens[:] = 4, 9
    logits = torch.randn(samples, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    masks = random_masks(samples, vocab, vocab)
    rows = np.arange(samples, dtype=np.int32)
    for kernels in (None, native):
        sampler = TorchSampler(samples, vocab, (3,), kernels)
        for row in rows.tolist():
            sampling = SamplingParams(**ways[row % len(ways)], seed=row)  # type: ignore[arg-type]
            request = InferRequest(request_id="r", prompt_token_ids=(1, 2), sampling=sampling, grammar="g")
            sampler.add_row(row, request)
        found.append(sampler.sample(rows, table.num_tokens, logits, table, masks))
    native.close()
    assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
    for row, token_id in enumerate(found[1].token_ids.tolist()):
        if masks.index[row] >= 0:
            assert int(masks.words[masks.index[row]][token_id >> 5]) >> (token_id & 31) & 1
    for row, entries in found[1].logprobs.items():
        raw = torch.log_softmax(logits[row], -1)
        assert entries[0].logprob == pytest.approx(float(raw[entries[0].token_id]), abs=1e-4)
