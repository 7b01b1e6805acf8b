"""An attack: a name, and the requests that it sends one after the other.

Used by the tables of attacks and by the process that sends them. Independent of sockets and of what is measured.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

MEMBER = '"k%d":1'
"""Of an object with many members, for `numbered`."""
JSON_LENGTH = "inference-header-content-length"


@dataclass(frozen=True)
class HttpSent:
    """A request over HTTP. `closes`: run when it was answered."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    closes: Callable[[], None] | None = None
    method: str = "POST"
    has_key: bool = True
    connections: int = 0
    """That send the body three times, in chunks of one byte, at the same time; 0: one request with a Content-Length."""

    def compressed(self, how: Literal["gzip", "deflate"]) -> HttpSent:
        body = gzip.compress(self.body, 1) if how == "gzip" else zlib.compress(self.body, 1)
        return HttpSent(self.path, body, self.headers | {"content-encoding": how})


@dataclass(frozen=True)
class GrpcSent:
    """A call of GRPCInferenceService with a serialised request; of a stream, the first response is the answer."""

    rpc: str
    message: bytes
    is_stream: bool = False
    gzip: bool = False


Sent = HttpSent | GrpcSent
Post = Callable[[str, object], dict[str, Any]]
"""A path and a body; the answer. Raises AssertionError unless its status is 200."""


@dataclass(frozen=True)
class Attack:
    """`make` gives the requests for a body of about `size` bytes. `most_bytes`: where the way in takes less than the
    server's default of 64 MiB. `expected`: a regular expression of which something must be in each answer over HTTP,
    its status and the beginning of its body; an attack that is refused by mistake would attack nothing."""

    name: str
    make: Callable[[int], list[Sent]]
    most_bytes: int = 1 << 40
    expected: str = "^(?!40[13])"

    def sent(self, size: int, post: Post) -> list[Sent]:
        """post: for requests that come before the attack's time."""
        return self.make(min(size, self.most_bytes))


@dataclass(frozen=True)
class PreparedAttack(Attack):
    """One whose requests name what earlier requests have made: `prepare` sends those, and gives the attack's own."""

    prepare: Callable[[int, Post], list[Sent]] = lambda size, post: []

    def sent(self, size: int, post: Post) -> list[Sent]:
        return self.prepare(min(size, self.most_bytes), post)


def repeated(text: str, size: int, between: str = ",") -> str:
    """`text` over and over, at least twice, in about `size` characters."""
    return between.join([text] * max(size // (len(text) + len(between)), 2))


def numbered(form: str, size: int, between: str = ",") -> str:
    """`form % n` for n from 0 on, in about `size` characters."""
    return between.join(form % number for number in range(max(size // (len(form) + len(between) + 6), 2)))
