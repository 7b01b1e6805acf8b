"""How rank 0 communicates with the other ranks: connections to processes on this or other machines, and the messages.

Used by rank 0's runner and followers, and by the processes of other ranks. A connection carries framed bytes; nothing
is unpickled. Invariants: both sides prove that they know the key of the meeting before anything else is read; a
connection whose other side ended, or whose machine or network is lost, fails within LOST_S seconds, even if nothing is
sent; a client that connects and sends nothing delays others by at most HANDSHAKE_S. Messages are frozen, and each is
sent to all followers in the order of the calls of rank 0's runner; after `apply`, the table of a follower contains, for
the rows of the plan, what `Runner.execute` may read; a message costs array operations and bytes in proportion to what
is new, a few tens of bytes per row of a decode step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Final

import msgspec
import numpy as np

from ...messages import InferRequest
from ...rank_order import RankMeeting
from ...step import PENDING_TOKEN, Int32Array, RowTable, StepPlan
from ..row_messages import BlockTableMirror

logger = logging.getLogger(__name__)

LOST_S: Final = 6
HANDSHAKE_S: Final = 10
RETRY_S: Final = 0.2
_PROBE_S: Final = 2
_REFUSED = (OSError, EOFError, AuthenticationError)


class RankListener:
    """Where rank 0 waits. Its address is bound at once; connections are accepted from `listen` on."""

    def __init__(self, meeting: RankMeeting) -> None:
        """Raises OSError naming the address."""
        self._meeting = meeting
        self._socket = socket.socket(socket.AF_INET6 if ":" in meeting.address else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((meeting.address, meeting.port))
        except OSError as error:
            self._socket.close()
            raise OSError(
                error.errno, f"the ranks cannot meet at {meeting.address} port {meeting.port}: {error.strerror}"
            ) from error

    def listen(self) -> None:
        self._socket.listen()

    def accept(self, timeout_s: float) -> tuple[Connection, str] | None:
        """The next connection with the right key, and its address; None = none within timeout_s, or one with a wrong
        key."""
        self._socket.settimeout(timeout_s)
        try:
            accepted, address = self._socket.accept()
        except TimeoutError:
            return None
        try:
            return _prove(accepted, self._meeting.key, is_server=True), str(address[0])
        except _REFUSED as error:
            logger.warning("%s connected without the key of the ranks: %s", address[0], error)
            return None

    def close(self) -> None:
        self._socket.close()


def connect(meeting: RankMeeting, timeout_s: float) -> Connection:
    """Connects to rank 0, which may not be listening yet. Raises OSError if it is not within timeout_s, and ValueError
    if its key differs."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            link = socket.create_connection((meeting.address, meeting.port), HANDSHAKE_S)
            return _prove(link, meeting.key, is_server=False)
        except AuthenticationError as error:
            raise ValueError(f"rank 0 at {meeting.address} port {meeting.port} has another key") from error
        except (OSError, EOFError) as error:  # it is not there yet, has ended, or is busy with others
            if time.monotonic() > deadline_s:
                why = getattr(error, "strerror", None) or str(error) or "the connection was closed"
                raise OSError(f"rank 0 is not at {meeting.address} port {meeting.port}: {why}") from error
        time.sleep(RETRY_S)


def watch(link: Connection, lost: Callable[[], None]) -> None:
    """Calls `lost` from a thread once the other side is gone. Reads nothing."""

    def wait() -> None:
        poll = select.poll()
        poll.register(link.fileno(), select.POLLRDHUP)
        poll.poll()
        lost()

    threading.Thread(target=wait, name="llm-rank-link", daemon=True).start()


def _prove(link: socket.socket, key: str, is_server: bool) -> Connection:
    """The connection, after both sides proved that they know the key. Raises one of _REFUSED; the socket is closed
    then."""
    link.settimeout(None)
    _notice_loss(link)
    connection = Connection(link.detach())
    try:
        with _time_limit(connection, HANDSHAKE_S):
            for prove in (deliver_challenge, answer_challenge)[:: 1 if is_server else -1]:
                prove(connection, key.encode())
    except _REFUSED:
        connection.close()
        raise
    return connection


def _notice_loss(link: socket.socket) -> None:
    """Makes the kernel probe an idle connection, and drop one whose data is not acknowledged."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_S - _PROBE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_S)


@contextlib.contextmanager
def _time_limit(connection: Connection, seconds: int) -> Iterator[None]:
    """Makes reads and writes inside fail after this many seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as options:
        _limit(options, seconds)
        yield
        _limit(options, 0)


def _limit(options: socket.socket, seconds: int) -> None:
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        options.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", seconds, 0))


class RowAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    row: int
    request: InferRequest


class RowRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    row: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A plan, and what is new in the table."""

    step_id: int
    num_rows: int
    num_tokens: int
    """Number of new tokens in `words`, not of tokens that the step computes."""
    has_drafts: bool
    has_masks: bool
    words: bytes
    """int32 in native byte order. Sections with one word per row: rows, num_scheduled_tokens, sample_rows, num_tokens,
    num_prompt_tokens, num_computed_tokens, where the new tokens of the row begin, how many there are, and
    num_draft_tokens if has_drafts. Then the new tokens, and the new blocks: rows, columns, ids."""


class Masks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The masks of the preceding Step, if it has any.

    index  int32 [samples]  as in TokenMasks
    words  uint32 [n, …]
    """

    index: bytes
    words: bytes


class Collect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Collects the oldest launched step."""


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have loaded: meet the others at this address."""

    address: str
    port: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message."""


Message = Join | RowAdded | RowRemoved | Step | Masks | Collect | Stop


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A follower's first message: it has loaded its part of the model, or an error says why not."""

    rank: int
    machine: str
    """For messages to people."""
    fingerprint: str
    """Of its config and release (`fingerprint_of`)."""
    error: str = ""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A follower's last message: why it cannot continue."""

    error: str


FromFollower = Loaded | Failed


class TableSender:
    """Makes Step messages; tracks what the followers know about rank 0's table."""

    def __init__(self, max_num_seqs: int) -> None:
        self._known_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._blocks: BlockTableMirror | None = None

    def forget(self, row: int) -> None:
        """The row has a new request: its tokens are sent again."""
        self._known_tokens[row] = 0

    def step(self, step_id: int, plan: StepPlan, table: RowTable) -> Step:
        rows, drafts = plan.rows, plan.num_draft_tokens
        starts, counts, token_ids = self._new_tokens(plan, table)
        sections = (
            rows,
            plan.num_scheduled_tokens,
            plan.sample_rows,
            table.num_tokens[rows],
            table.num_prompt_tokens[rows],
            table.num_computed_tokens[rows],
            starts,
            counts,
            *([] if drafts is None else [drafts]),
        )
        words = np.concatenate((*sections, token_ids, *self._new_blocks(plan, table)), dtype=np.int32)
        return Step(step_id, len(rows), len(token_ids), drafts is not None, plan.masks is not None, words.tobytes())

    def _new_tokens(self, plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Where the new tokens of each row begin and how many there are; and all new tokens. Pending tokens and drafts
        are sent again with the next step."""
        rows, num_tokens = plan.rows, table.num_tokens[plan.rows]
        starts = np.minimum(self._known_tokens[rows], num_tokens)
        ends = num_tokens if plan.num_draft_tokens is None else num_tokens + plan.num_draft_tokens
        counts = (ends - starts).astype(np.int32)
        owners, columns = _ragged(starts, counts)
        token_ids = table.token_ids[rows[owners], columns]
        pending = np.bincount(owners[token_ids == PENDING_TOKEN], minlength=len(rows))
        self._known_tokens[rows] = num_tokens - pending
        return starts, counts, token_ids

    def _new_blocks(self, plan: StepPlan, table: RowTable) -> Int32Array:
        if self._blocks is None:
            self._blocks = BlockTableMirror(*table.block_table.shape)
        changes = self._blocks.changes(plan, table)
        self._blocks.mark_sent(changes)
        return changes


def apply(step: Step, table: RowTable) -> StepPlan:
    """Updates the table of a follower. Returns the plan."""
    words, num_sections = np.frombuffer(step.words, np.int32), 9 if step.has_drafts else 8
    split = num_sections * step.num_rows
    sections = words[:split].reshape(num_sections, -1)
    token_ids, blocks = words[split : split + step.num_tokens], words[split + step.num_tokens :].reshape(3, -1)
    rows, scheduled, samples, num_tokens, num_prompt_tokens, num_computed_tokens, starts, counts = sections[:8]
    table.num_tokens[rows] = num_tokens
    table.num_prompt_tokens[rows] = num_prompt_tokens
    table.num_computed_tokens[rows] = num_computed_tokens
    owners, columns = _ragged(starts, counts)
    table.token_ids[rows[owners], columns] = token_ids
    table.block_table[blocks[0], blocks[1]] = blocks[2]
    return StepPlan(rows, scheduled, samples != 0, sections[8] if step.has_drafts else None)


def _ragged(starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """The numbers starts[i] … starts[i] + counts[i] - 1 for all i in order: the i of each number, and the number."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    return owners, np.arange(len(owners), dtype=np.int32) - firsts[owners] + starts[owners]
