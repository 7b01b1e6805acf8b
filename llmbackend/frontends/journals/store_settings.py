"""Settings of the response store and of answers that are retained for retried requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from .documents import Storage
    from .response_store import ResponseStore

MEMORY: Final = "memory"
_SQLITE: Final = "sqlite:"
_REDIS: Final = ("redis://", "rediss://", "unix://")
DAY_S: Final = 86_400.0
_MEMORY_TTL_S: Final = 3_600.0
_PERSISTENT_TTL_S: Final = 30 * DAY_S
"""As long as OpenAI retains responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyLimits:
    """Limits of one API key, or of all clients without keys together."""

    ttl_s: float = 600.0
    """Time from the first request on; 0: the header is ignored."""
    max_answers: int = 1000
    max_bytes: int = 64 << 20
    """Limit of the answers together; when it is exceeded, the oldest are removed."""
    max_answer_bytes: int = 8 << 20
    """A larger answer is not retained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """A store before it is opened."""

    url: str = MEMORY
    """One of FORMS."""
    ttl_s: float | None = None
    """None: an hour in memory, 30 days elsewhere."""
    max_bytes: int = 256 << 20
    """Approximate limit of documents and events."""
    max_responses_per_key: int = 10_000
    resume_grace_s: float = 30.0
    """How long a resumable stream, or a request with an Idempotency-Key, continues without a client."""
    idempotency: IdempotencyLimits = IdempotencyLimits()

    FORMS: ClassVar = "memory, sqlite:PATH, or redis://HOST:PORT/DB"

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.url == _SQLITE + ":memory:":  # SQLite's name for a database that does not survive the process
            object.__setattr__(self, "url", MEMORY)
        if self.url != MEMORY and not self._path and not self.url.startswith(_REDIS):
            raise ValueError(f"the response store is '{self.url.rpartition('@')[2]}', expected {self.FORMS}")

    def open(self) -> ResponseStore:
        """Raises StoreError."""
        return self.store_on(self.open_storage())

    def store_on(self, storage: Storage) -> ResponseStore:
        """A store on top of an opened storage."""
        from .response_store import ResponseStore  # not needed to read flags

        ttl_s = self.ttl_s or (_MEMORY_TTL_S if self.url == MEMORY else _PERSISTENT_TTL_S)
        return ResponseStore(storage, ttl_s)

    @property
    def _path(self) -> str:
        return self.url.removeprefix(_SQLITE) if self.url.startswith(_SQLITE) else ""

    def open_storage(self) -> Storage:
        """Imports only the kind that is used. Raises StoreError."""
        from .documents import Capacity

        capacity = Capacity(self.max_bytes, self.max_responses_per_key)
        if self.url.startswith(_REDIS):
            from .redis_storage import RedisStorage

            return RedisStorage(self.url, capacity)
        from .sqlite_storage import SqliteStorage

        return SqliteStorage(Path(self._path) if self._path else None, capacity)


IN_MEMORY: Final = StoreSettings()
