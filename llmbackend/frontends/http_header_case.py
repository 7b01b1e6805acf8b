"""HTTP header names as the client wrote them.

For: servers that forward headers: uvicorn keeps names in lower case alone, and Triton forwards them as they came
(golden 60). Does not know: which headers are forwarded. Invariant: `scope[SENT_NAMES]` has one name for each entry of
`scope["headers"]`, in the same order; without this protocol it is not there.
"""

from __future__ import annotations

from typing import Any, Final

from .http_protocol import GuardedProtocol

SENT_NAMES: Final = "llmbackend.sent_header_names"


class CaseKeepingProtocol(GuardedProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._names: list[bytes] = []
        scope: Any = self.scope
        scope[SENT_NAMES] = self._names

    def on_header(self, name: bytes, value: bytes) -> None:
        before = len(self.headers)
        super().on_header(name, value)
        if len(self.headers) > before:
            self._names.append(name)


def headers_as_sent(scope: Any) -> list[tuple[bytes, bytes]]:
    """(name, value) of each header of an ASGI request."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = scope.get(SENT_NAMES)
    return headers if names is None else [(name, value) for name, (_, value) in zip(names, headers, strict=True)]
