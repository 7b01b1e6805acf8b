"""The order for a rank of an engine that spans machines: its number and the address of rank 0. Knowledge of the key is
proved on connection; the key is never sent."""

from __future__ import annotations

import hashlib

import msgspec

from .config import EngineConfig

MIN_KEY_LENGTH = 32


class RankMeeting(msgspec.Struct, frozen=True):
    """Raises ValueError.

    address  IP address of rank 0's machine, as reached by the others
    port     of that address, free on that machine while the engine lives
    key      secret of this engine's ranks, 32 characters or more
    """

    address: str
    port: int
    key: str

    def __repr__(self) -> str:
        """Omits the key."""
        return f"RankMeeting({self.address} port {self.port})"

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ValueError(f"'port' of the ranks' meeting is {self.port}, expected 1 to 65535")
        if len(self.key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"'key' of the ranks' meeting has {len(self.key)} characters, expected at least {MIN_KEY_LENGTH}"
            )


class RankOrder(msgspec.Struct, frozen=True):
    """Read as JSON by `python -m llmbackend.engine.gpu.parallel.rank_process`. Raises ValueError.

    config   rank 0's; `model`, `device` and `num_threads` may be this machine's
    rank     1 .. config.num_ranks - 1
    """

    config: EngineConfig
    rank: int
    meeting: RankMeeting

    def __post_init__(self) -> None:
        last = self.config.num_ranks - 1
        if not 1 <= self.rank <= last:
            raise ValueError(f"'rank' is {self.rank}, expected 1 to {last} of {self.config.num_ranks} ranks")


def fingerprint_of(config: EngineConfig, release: str) -> str:
    """Equal for ranks that compute parts of the same model in the same way. The model's folder may differ between
    machines."""
    same = msgspec.structs.replace(config, model="", device="", num_threads=0)
    digest = hashlib.sha256(msgspec.json.encode(same, order="sorted")).hexdigest()
    return f"{release} {digest[:16]}"
