"""What `make cluster` judges with: links that are cut, requests that are sent again, pauses; each of them can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from trials.chaos.clients.patience import Patience
from trials.chaos.cluster.kills import Ends, Kill, Kind
from trials.chaos.cluster.pauses import longest_pause
from trials.chaos.cluster.relay import Relay
from trials.chaos.cluster.returning import AnyAddress, Break, ReturnedRun, ReturningStream
from trials.chaos.cluster.stage import ClusterStage
from trials.chaos.cluster.table import ClusterRow
from trials.chaos.load import Arrivals
from trials.chaos.outcome import Outcome, Piece, StreamFailed
from trials.chaos.specs import StreamSpec

SPEC = StreamSpec(1, "generate", "mock", "a", "{}", True, None)


# --- links ------------------------------------------------------------------------------------------------------------


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


async def test_a_cut_link_passes_nothing_until_it_heals() -> None:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()
    relay = Relay("echo", lambda: target)
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"before")
    assert await reader.readexactly(6) == b"before"
    relay.cut()
    writer.write(b"meanwhile")
    late_reader, late_writer = await asyncio.open_connection("127.0.0.1", relay.port)
    late_writer.write(b"late")
    late_writer.write_eof()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    relay.heal()
    assert await late_reader.read() == b"late"
    writer.close()
    late_writer.close()
    assert await reader.read() == b"meanwhile"
    await relay.close()
    server.close()
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


async def test_a_link_ends_with_either_side() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    target = server.sockets[0].getsockname()
    relay = Relay("closed", lambda: target)
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    assert await reader.read() == b""
    writer.close()
    server.close()
    await server.wait_closed()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    assert await reader.read() == b""
    writer.close()
    await relay.close()


# --- streams that come back -------------------------------------------------------------------------------------------


class BreakingClient:
    """Breaks the first connections after as many pieces as `cuts` says."""

    def __init__(self, cuts: list[int], code: str = "connection") -> None:
        self.cuts, self.code = cuts, code

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        cut = self.cuts.pop(0) if self.cuts else None
        for number, text in enumerate("abc"):
            if number == cut:
                raise StreamFailed("gone", self.code)
            yield Piece(text)


class OneClient:
    """In place of the clients of all addresses."""

    def __init__(self, client: BreakingClient) -> None:
        self.client = client
        self.breaks: list[Break] = []

    def next(self) -> OneClient:
        return self

    def of(self, spec: StreamSpec) -> BreakingClient:
        return self.client


async def run_with(clients: OneClient) -> ReturnedRun:
    run = await ReturningStream(SPEC, AnyAddress(clients), Arrivals()).ended()  # type: ignore[arg-type]
    assert isinstance(run, ReturnedRun)
    return run


async def test_a_request_whose_connection_is_lost_is_sent_again() -> None:
    clients = OneClient(BreakingClient([2, 0]))
    run = await run_with(clients)
    assert (run.outcome.text, run.outcome.error) == ("abc", None)
    assert [outcome.text for outcome in run.broken] == ["ab", ""]
    assert len(clients.breaks) == 2 and len(run.times_s) == 7


async def test_an_error_of_the_server_is_no_lost_connection() -> None:
    run = await run_with(OneClient(BreakingClient([2], "503")))
    assert (run.outcome.text, run.outcome.code, run.broken) == ("ab", "503", ())


async def test_patience_ends() -> None:
    noted: list[StreamFailed] = []
    waiting = Patience(0.1, lambda spec, error: noted.append(error)).begin(SPEC)
    with pytest.raises(StreamFailed, match="gone"):
        for _ in range(100):
            await waiting.again(StreamFailed("gone", "connection"))
    assert 0 < len(noted) < 100
    with pytest.raises(StreamFailed, match="no"):
        await waiting.again(StreamFailed("no", "400"))


# --- judging ----------------------------------------------------------------------------------------------------------


def kill(ends: Ends = Ends.NONE) -> Kill:
    return Kill(Kind.FRONTEND, 10.0, 10.0, "1", ends)


def row_of(run: ReturnedRun, breaks: Sequence[Break], *kills: Kill) -> ClusterRow:
    stage = ClusterStage(None, Breaks(list(breaks)), {SPEC: Outcome("abc")}, list(kills))  # type: ignore[arg-type]
    row = ClusterRow("round", 1.0, list(kills))
    stage.judge(row, [run])
    return row


@dataclass
class Breaks:
    breaks: list[Break]


def test_a_lost_connection_needs_a_kill() -> None:
    run, breaks = ReturnedRun(SPEC, Outcome("abc"), times_s=[9.0, 9.9, 10.2, 10.9]), [Break(SPEC, 9.0, 10.1, "gone")]
    assert not row_of(run, breaks, kill(Ends.ALL)).problems
    later = Kill(Kind.FRONTEND, 10.2, 10.2, "1", Ends.ALL)
    for other in ((), (kill(Ends.NONE),), (kill(Ends.PASSED_ON),), (later,)):
        assert any("lost its connection" in problem for problem in row_of(run, breaks, *other).problems)


def test_what_came_before_a_connection_was_lost_is_judged() -> None:
    good, bad = Outcome("ab", error="gone", code="connection"), Outcome("b", error="gone", code="connection")
    assert not row_of(ReturnedRun(SPEC, Outcome("abc"), broken=[good], times_s=[1.0, 2.0]), ()).problems
    assert row_of(ReturnedRun(SPEC, Outcome("abc"), broken=[bad], times_s=[1.0, 2.0]), ()).wrong_tokens
    assert row_of(ReturnedRun(SPEC, Outcome("abcc"), times_s=[1.0, 2.0]), ()).repeated == 1


@pytest.mark.parametrize(
    ("times_s", "expected_s"),
    [
        ([9.0, 9.9, 10.7, 11.0], 0.7),  # it began before the kill
        ([9.0, 9.9, 10.1, 12.0, 12.1], 1.9),  # one more piece was under way
        ([9.0, 9.9, 10.1, 10.6, 19.0], 0.5),  # what is long after the kill is not of it
        ([8.0, 9.0], None),
        ([10.5, 19.0], None),
    ],
)
def test_the_pause_of_a_kill(times_s: list[float], expected_s: float | None) -> None:
    found = longest_pause(kill(), [("a", times_s)])
    assert found is None if expected_s is None else found is not None and found.seconds == pytest.approx(expected_s)


def test_a_pause_says_when_connections_were_lost_within_it() -> None:
    at_s = kill().begin_s
    streams = [("a", [at_s - 1, at_s - 0.1, at_s + 0.9]), ("b", [at_s - 1, at_s + 0.1])]
    found = longest_pause(kill(), streams, {"a": [at_s + 0.3, at_s + 0.1, at_s - 0.5, at_s + 5], "b": [at_s]})
    assert found is not None and found.lost_s == pytest.approx((0.1, 0.3))
    assert str(found).endswith(": no connection at 0.10, 0.30 s, and 0.60 s to the next piece")


def test_pauses_beyond_the_limit_are_a_problem() -> None:
    slow = ReturnedRun(SPEC, Outcome("abc"), times_s=[9.0, 9.9, 11.1, 12.0])
    assert any("the pause of 99 %" in problem for problem in row_of(slow, (), kill()).problems)
