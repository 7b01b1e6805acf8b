"""The process of an engine that serves several hosts, as its keeper's fork server makes it.

For: the keeper's fork server. Does not know: hosts' requests. Invariants: hosts are answered from before the load on; a
load that fails is told to hosts for FAILED_LOAD_S, before the keeper hears of it and starts another process; the
process never outlives its keeper.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from llmbackend.links.secrets import ClusterSecrets

from ...config import EngineConfig
from ...messages import ModelPrepared
from ...step import Runner
from ..engine_process import EngineProgram, end_at_once, end_with_host, load
from .host_links import GOODBYE_TIMEOUT_S, HostLinks
from .served_order import ServedProcessOrder

FAILED_LOAD_S: Final = 10.0

_decode_order = msgspec.json.Decoder(ServedProcessOrder).decode


class ServedEngineProgram(EngineProgram):
    def __call__(self, order: bytes, *descriptors: int) -> None:
        """An engine. descriptors: the lifeline, and the listening socket."""
        lifeline_fd, listen_fd = descriptors
        os.set_inheritable(listen_fd, False)
        engine = _decode_order(order)
        make = self._parts.in_own_process(engine.is_whole, lifeline_fd, engine.meeting)
        make_runner = partial(_make_runner, make, self._config)
        end_with_host(lifeline_fd)
        logging.basicConfig(level=logging.INFO, format="engine %(process)d %(levelname)s %(message)s")
        links = HostLinks(engine.config, engine, ClusterSecrets.load(engine.secrets_folder), listen_fd)
        core = load(self._config, make_runner, links, self._before)
        if core is not None:
            gc.collect()
            gc.freeze()
            links.serve(core)
        elif links.has_failed:
            links.answer_for(FAILED_LOAD_S)
        else:
            links.answer_until_left(GOODBYE_TIMEOUT_S)
        links.close()
        if core is None:
            end_at_once()


def _make_runner(make: Callable[[], Runner | ModelPrepared], config: EngineConfig) -> Runner | ModelPrepared:
    """Raises ValueError where a folder that another machine has is missing on this one."""
    if os.path.isabs(config.model) and not os.path.isdir(config.model):
        raise ValueError(f"engine argument 'model' is '{config.model}', which is not a folder on this machine")
    return make()


def prepare(runners: str, config_json: str) -> ServedEngineProgram:
    """In the fork server, as engine_process.prepare."""
    return ServedEngineProgram(msgspec.json.decode(config_json, type=EngineConfig), runners)
