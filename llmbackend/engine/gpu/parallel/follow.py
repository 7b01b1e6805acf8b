"""What the process of rank 1 or up does: loads its part, meets the others, and repeats rank 0's calls until the end.

Runs in processes that rank 0 forked, and in those started elsewhere (`rank_process.py`). Invariant: a rank that cannot
continue tells rank 0 why, and exits.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import time
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from llmbackend import __version__

from ...config import EngineConfig
from ...errors import LOST_RANK_EXIT_CODE
from ...model.loader import LoadedModel
from ...rank_order import RankOrder, fingerprint_of
from ...step import OverlappingRunner, RowTable
from ...token_masks import TokenMasks, num_words
from . import collectives
from .collectives import RankPlace, Ranks
from .followers import NOTICE_S
from .links import (
    Collect,
    Failed,
    FromFollower,
    Join,
    Loaded,
    Masks,
    Message,
    RowAdded,
    RowRemoved,
    Step,
    Stop,
    apply,
    connect,
    watch,
)
from .parallel_runner import start_part
from .parts import load_part

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def follow(config: EngineConfig, rank: int, link: Connection) -> None:
    """In a process that rank 0 forked."""
    ranks, start_s = Ranks(RankPlace.of(config, rank)), time.monotonic()
    part = _load(config, ranks, is_alone=False)
    _take_part(config, ranks, part, link, start_s)


def follow_order(order: RankOrder) -> None:
    """In a process started elsewhere. Raises OSError or ValueError if it cannot reach rank 0."""
    config, start_s = order.config, time.monotonic()
    ranks = Ranks(RankPlace.of(config, order.rank))
    part = _load(config, ranks, is_alone=True)
    link = connect(order.meeting, config.load_timeout_s)
    watch(link, _end_at_once)
    _take_part(config, ranks, part, link, start_s)


def _end_at_once() -> None:
    """Rank 0 is gone; its device and this one may be waiting for each other."""
    os._exit(LOST_RANK_EXIT_CODE)


def _load(config: EngineConfig, ranks: Ranks, is_alone: bool) -> LoadedModel | Exception:
    try:
        return load_part(config, ranks, is_alone)
    except Exception as error:
        logger.error("rank %d cannot load its part: %s", ranks.place.rank, error)
        return error


def _take_part(
    config: EngineConfig, ranks: Ranks, part: LoadedModel | Exception, link: Connection, start_s: float
) -> None:
    error = str(part) or type(part).__name__ if isinstance(part, Exception) else ""
    _tell(link, Loaded(ranks.place.rank, platform.node(), fingerprint_of(config, __version__), error))
    if isinstance(part, Exception):
        return
    try:
        join = _decode(link.recv_bytes())
    except EOFError:  # the load failed elsewhere
        return
    assert isinstance(join, Join)
    try:
        ranks.join(part.device, join.address, join.port, config.load_timeout_s)
        runner = start_part(config, part, ranks, start_s)
    except Exception as failure:
        # Rank 0 will probably fail with the same error, report it, and end this process.
        _tell(link, Failed(str(failure) or type(failure).__name__))
        link.recv_bytes()
        return
    try:
        _serve(runner, config, link)
    except Exception as failure:
        time.sleep(NOTICE_S)
        _tell(link, Failed(f"a step failed ({type(failure).__name__}: {failure})"))
        raise
    runner.close()
    collectives.leave()


def _tell(link: Connection, message: FromFollower) -> None:
    link.send_bytes(_encode(message))


def _serve(runner: OverlappingRunner, config: EngineConfig, link: Connection) -> None:
    """Repeats rank 0's calls until it sends Stop or ends."""
    table = RowTable(config.max_num_seqs, runner.info.max_model_len, runner.info.block_size)
    while True:
        try:
            message = _decode(link.recv_bytes())
        except EOFError:
            return
        match message:
            case Step():
                plan = apply(message, table)
                if message.has_masks:
                    plan = dataclasses.replace(plan, masks=_ReceivedMasks(link, runner.info.vocab_size))
                runner.launch(message.step_id, plan, table)
            case Collect():
                runner.collect()
            case RowAdded():
                runner.add_row(message.row, message.request)
            case RowRemoved():
                runner.remove_row(message.row)
            case Stop() | Join() | Masks():
                return


class _ReceivedMasks:
    """A follower's masks of the step that it launches; rank 0 sends them once it has computed them."""

    def __init__(self, link: Connection, vocab_size: int) -> None:
        self._link, self._vocab_size = link, vocab_size
        self._masks: TokenMasks | None = None

    def result(self) -> TokenMasks:
        if self._masks is None:
            message = _decode(self._link.recv_bytes())
            assert isinstance(message, Masks)
            words = np.frombuffer(message.words, np.uint32).reshape(-1, num_words(self._vocab_size))
            self._masks = TokenMasks(np.frombuffer(message.index, np.int32), words)
        return self._masks
