"""The engine argument kv_events_config, with vLLM's names.

For: EngineConfig. Does not know: events, sockets. Invariant: what is sent holds the tokens of prompts in plain text, so
that only addresses of this machine are allowed.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5557"
MAX_PORT: Final = 65535


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine tells routers of others (llm-d, Dynamo) which KV blocks it has. Raises ValueError naming field,
    value and what was expected.

    enable_kv_cache_events  whether it does
    publisher               "zmq", or "null" = it does not after all
    endpoint                tcp:// with a loopback address and a port, where subscribers connect; vLLM connects to an
                            address without "*", here it is bound
    replay_endpoint         the same for requests of what was missed; None = there is no replay
    buffer_steps            batches of events that are kept for it
    hwm                     batches that may wait for one subscriber before it misses some
    max_queue_size          accepted, without effect: what waits is bounded by `hwm`
    topic                   of all batches
    data_parallel_rank      added to both ports, and sent with each batch: set for the instances of a model, in their
                            order
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = DEFAULT_ENDPOINT
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"'{name}' is {getattr(self, name)}, expected at least 1")
        if not 0 <= self.data_parallel_rank < MAX_PORT:
            raise ValueError(f"'data_parallel_rank' is {self.data_parallel_rank}, expected 0 to {MAX_PORT - 1}")
        self._own(self.endpoint, "endpoint")
        if self.replay_endpoint is not None:
            self._own(self.replay_endpoint, "replay_endpoint")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def own_endpoint(self) -> str:
        """Of this instance."""
        return self._own(self.endpoint, "endpoint")

    @property
    def own_replay_endpoint(self) -> str | None:
        return None if self.replay_endpoint is None else self._own(self.replay_endpoint, "replay_endpoint")

    def _own(self, endpoint: str, name: str) -> str:
        try:
            parts = urlsplit(endpoint)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise self._wrong(endpoint, name) from None
        is_whole = endpoint == f"{parts.scheme}://{parts.netloc}" and "@" not in endpoint
        if parts.scheme != "tcp" or not is_whole or port is None or not _is_loopback(host):
            raise self._wrong(endpoint, name)
        own_port = port + self.data_parallel_rank
        if not 0 < own_port <= MAX_PORT:
            raise ValueError(
                f"'{name}' is '{endpoint}', expected a port from 1 to {MAX_PORT - self.data_parallel_rank}"
            )
        host = "127.0.0.1" if host == "localhost" else host
        return f"tcp://[{host}]:{own_port}" if ":" in host else f"tcp://{host}:{own_port}"

    @staticmethod
    def _wrong(endpoint: str, name: str) -> ValueError:
        return ValueError(
            f"'{name}' is '{endpoint}', expected tcp:// with a loopback address and a port ({DEFAULT_ENDPOINT}): "
            "events hold the tokens of prompts in plain text, and are not sent to other machines"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
