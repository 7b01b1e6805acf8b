"""Several engines of one model: requests go where their beginnings are, with real engine processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmbackend.adapter.model_state import ModelState
from llmbackend.adapter.tasks.placement import PrefixIndex
from tests.helpers.core_host import version_of
from tests.helpers.llm_host import MODEL, Call, LlmHost, llm_host
from tests.helpers.waiting import eventually

TWO = "instance_group [ { kind: KIND_CPU, count: 2 } ]"


@contextmanager
def two_engines(path: Path, **arguments: Any) -> Iterator[tuple[LlmHost, ModelState]]:
    with llm_host(path, TWO, transport="process", max_model_len=1024, **arguments) as host:
        state = version_of(host.server, MODEL).state
        assert isinstance(state, ModelState)
        yield host, state


def index_of(state: ModelState) -> PrefixIndex:
    return state.prefixes.placement.index


def num_blocks(state: ModelState) -> list[int]:
    return [index_of(state).num_blocks(engine.assignment.bit) for engine in state._engines]


def has_blocks(state: ModelState, at_least: int) -> bool:
    return sum(num_blocks(state)) >= at_least


def turn(host: LlmHost, text: str, **inputs: Any) -> Call:
    call = host.infer(text_input=text, sampling={"max_tokens": 4, "ignore_eos": True}, **inputs)
    assert call.error is None
    return call


def test_the_next_turns_of_conversations_go_to_the_engines_that_had_the_first(tmp_path: Path) -> None:
    """Else both engines would have its beginning."""
    with two_engines(tmp_path) as (host, state):
        texts = {name: f"{name} is the beginning of this long conversation. " * 4 for name in ("ann", "bob", "eve")}
        for _ in range(4):
            for name, text in texts.items():
                expected = sum(num_blocks(state)) + 1
                texts[name] += turn(host, text, exclude_input_in_output=True).text + " And then what happened? "
                eventually(partial(has_blocks, state, expected))
        blocks = [index_of(state).blocks_of(engine.assignment.bit) for engine in state._engines]
        assert all(blocks) and not blocks[0] & blocks[1]


def test_two_engines_work_at_once_though_one_has_what_all_begin_with(tmp_path: Path) -> None:
    with two_engines(tmp_path, max_num_seqs=4, mock_step_ms=20) as (host, state):
        turn(host, "We all begin with this text. " * 3)
        texts = [f"{'We all begin with this text. ' * 3}{i}" for i in range(8)]
        calls = [host.start(text_input=text, sampling={"max_tokens": 40, "ignore_eos": True}) for text in texts]
        eventually(lambda: [engine.manager.capacity for engine in state._engines] == [0, 0])
        assert all(call.wait().error is None for call in calls)
        eventually(lambda: min(num_blocks(state)) > 20)


def test_a_dead_engine_has_nothing_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    with two_engines(tmp_path) as (host, state):
        turn(host, "A text of one engine. " * 8)
        eventually(lambda: sum(num_blocks(state)) > 0)
        owner = next(engine for engine, count in zip(state._engines, num_blocks(state), strict=True) if count)
        first_pid = owner.manager.kill_engine()
        assert first_pid
        eventually(lambda: num_blocks(state) == [0, 0])
        turn(host, "A text of one engine. " * 8)
        eventually(lambda: owner.manager.state.pid not in (None, first_pid))
        for i in range(8):
            turn(host, f"{i}: a text of any engine. " * 8)
        eventually(lambda: min(num_blocks(state)) > 0)


def test_no_request_waits_for_an_engine_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_engines(tmp_path) as (host, state):
        down, other = state._engines
        launch = down.manager._supervisor._launch_when_due
        held = threading.Event()
        monkeypatch.setattr(down.manager._supervisor, "_launch_when_due", lambda: held.wait(60) and launch())
        assert state.ready_engines() == [down, other]
        assert down.manager.kill_engine()
        eventually(lambda: not down.manager.is_up)
        assert state.ready_engines() == [other]
        turn(host, "It has room for more than the other one.")
        held.set()
        eventually(lambda: state.ready_engines() == [down, other])


def test_tenants_do_not_share_and_are_not_compared(tmp_path: Path) -> None:
    with two_engines(tmp_path) as (host, state):
        turn(host, "A text that all know. " * 8)
        eventually(lambda: sum(num_blocks(state)) > 0)
        known = sum(num_blocks(state))
        turn(host, "A text that all know. " * 8)
        assert sum(num_blocks(state)) == known
        host.infer(text_input="A text that all know. " * 8, sampling={"max_tokens": 4, "cache_salt": "mine"})
        eventually(lambda: sum(num_blocks(state)) > 1.5 * known)


def test_one_engine_is_asked_nothing_until_there_is_another(tmp_path: Path) -> None:
    with llm_host(tmp_path, max_model_len=1024) as host:
        state = version_of(host.server, MODEL).state
        assert isinstance(state, ModelState)
        turn(host, "The only engine has this. " * 8)
        assert num_blocks(state) == [0]
        assert state.prefixes.placement.block_size == 0
