"""What an attack is: a name, and the requests that it sends one after the other.

For: the tables of attacks, and the process that sends them. Does not know: sockets, what is measured.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

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


@dataclass(frozen=True)
class Attack:
    """`make` gives the requests for a body of about `size` bytes. `most_bytes`: where the way in takes less than the
    server's default of 64 MiB. `expected`: a regular expression of which something must be in each answer over HTTP,
    its status and the beginning of its body; an attack that is refused by mistake would attack nothing."""

    name: str
    make: Callable[[int], list[Sent]]
    most_bytes: int = 1 << 40
    expected: str = ""

    def sent(self, size: int) -> list[Sent]:
        return self.make(min(size, self.most_bytes))


def repeated(text: str, size: int, between: str = ",") -> str:
    """`text` over and over, at least twice, in about `size` characters."""
    return between.join([text] * max(size // (len(text) + len(between)), 2))


def numbered(form: str, size: int, between: str = ",") -> str:
    """`form % n` for n from 0 on, in about `size` characters."""
    return between.join(form % number for number in range(max(size // (len(form) + len(between) + 6), 2)))
