"""API keys: their sources, and the account of a request's key.

Invariants: keys are stored as SHA-256 digests and never shown, not even in errors; the time of a lookup does not depend
on its result; while a key file is invalid, the previous keys remain valid.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..shared_counts import SharedCounts
from .permissions import Role
from .rate_limit import Account, Clock, Limits

log = logging.getLogger(__name__)

NO_KEY: Final = (
    "You didn't provide an API key. Provide it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
)
NO_KEY_ANTHROPIC: Final = (
    "You didn't provide an API key. Provide it in a header: 'x-api-key: YOUR_KEY' or 'Authorization: Bearer YOUR_KEY'."
)
WRONG_KEY: Final = "Incorrect API key provided."
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY: Final = re.compile(r"[!-~]{1,512}")
_OWNER: Final = b"llmbackend: owner of what is stored"
_MAX_FILE_BYTES: Final = 1 << 20
_CHECK_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    digest: bytes
    """SHA-256."""
    limits: Limits
    role: Role = Role.USER

    @property
    def owner(self) -> str:
        """Owner of data stored for this key: a hash of the key, the same on every server and after every restart. It
        cannot equal a key name, which never has a colon."""
        return f"key:{hmac.digest(self.digest, _OWNER, 'sha256').hex()[:32]}"


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def parse_keys(text: str, defaults: Limits) -> list[ApiKey]:
    """Parses lines `name:key [role=user|operator] [rpm=N] [tpm=N] [concurrency=N]`; blank lines and comments that begin
    with # are skipped. Raises ValueError, whose text names the line and contains no key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_parse_line(words, defaults))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return keys


def unnamed_keys(keys: Iterable[str], defaults: Limits) -> list[ApiKey]:
    """Keys without a name (vLLM's --api-key), named api-key-1, api-key-2, …, with the role user. Raises ValueError."""
    return [ApiKey(f"api-key-{number}", _digest(key), defaults) for number, key in enumerate(keys, 1)]


def _parse_line(words: list[str], defaults: Limits) -> ApiKey:
    name, colon, key = words[0].partition(":")
    if not colon or not _NAME.fullmatch(name):
        raise ValueError("expected name:key, where the name has 1 to 64 letters, digits, '.', '_' or '-'")
    limits = {"rpm": defaults.requests, "tpm": defaults.tokens, "concurrency": defaults.concurrency}
    role = Role.USER
    for word in words[1:]:
        what, _, value = word.partition("=")
        if what == "role" and value in set(Role):
            role = Role(value)
        elif what in limits and value.isascii() and value.isdecimal():
            limits[what] = int(value)
        else:
            raise ValueError("expected rpm=N, tpm=N, concurrency=N or role=user|operator after the key")
    return ApiKey(name, _digest(key), Limits(limits["rpm"], limits["tpm"], limits["concurrency"]), role)


def _digest(key: str) -> bytes:
    if not _KEY.fullmatch(key):
        raise ValueError("a key is 1 to 512 visible ASCII characters")
    return digest_of(key)


def check_distinct(keys: Iterable[ApiKey]) -> None:
    """Raises ValueError if two keys have the same name or the same value."""
    names: set[str] = set()
    digests: set[bytes] = set()
    for key in keys:
        if key.name in names:
            raise ValueError(f"the name '{key.name}' occurs twice")
        if key.digest in digests:
            raise ValueError(f"the key of '{key.name}' occurs twice")
        names.add(key.name)
        digests.add(key.digest)


class KeyFile:
    """A key file that is reloaded when it changes."""

    def __init__(self, path: Path, defaults: Limits) -> None:
        self.path = path
        self._defaults = defaults
        self._seen: tuple[int, ...] = ()

    def has_changed(self) -> bool:
        """True once per change, including removal."""
        seen = self._signature()
        changed, self._seen = seen != self._seen, seen
        return changed

    def read(self) -> list[ApiKey]:
        """Raises ValueError, whose text names the file, if it cannot be read or contains no key."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_MAX_FILE_BYTES + 1)
            if len(text) > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
            keys = parse_keys(text.decode(), self._defaults)
            if not keys:
                raise ValueError("it contains no key")
        except OSError as error:
            raise ValueError(f"API key file '{self.path}': {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"API key file '{self.path}': it is not UTF-8 text") from None
        except ValueError as error:
            raise ValueError(f"API key file '{self.path}': {error}") from None
        return keys

    def _signature(self) -> tuple[int, ...]:
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino


class KeyRing:
    """All valid keys and their accounts. Used on the event loop.

    A lookup checks the file for changes, at most once per second. An account survives a reload that changes neither its
    key, its limits nor its role.
    """

    def __init__(
        self,
        fixed: Iterable[ApiKey],
        file: KeyFile | None = None,
        clock: Clock = time.monotonic,
        *,
        shares_caches: bool = False,
        shared: SharedCounts | None = None,
    ) -> None:
        """shared: see Account. Raises ValueError if a key occurs twice or the file is invalid."""
        self._shares_caches = shares_caches
        self._shared = shared
        self._fixed = tuple(fixed)
        self._file = file
        self._clock = clock
        self._checked_at_s = clock()
        self._entries: tuple[tuple[bytes, Account], ...] = ()
        if file is not None:
            file.has_changed()
        self._install(file.read() if file is not None else [])

    def find(self, presented: bytes) -> Account | None:
        """Compares with every key, so that the time does not depend on the result."""
        self._refresh()
        digest = hashlib.sha256(presented).digest()
        found: Account | None = None
        for known, account in self._entries:
            if hmac.compare_digest(digest, known):
                found = account
        return found

    @property
    def accounts(self) -> list[Account]:
        """All accounts, sorted by name."""
        return sorted((account for _, account in self._entries), key=lambda account: account.name)

    @property
    def has_operator(self) -> bool:
        return any(account.role is Role.OPERATOR for _, account in self._entries)

    def reload(self) -> None:
        """Reads the file again. Raises ValueError."""
        if self._file is not None:
            self._file.has_changed()
            self._install(self._file.read())

    def _refresh(self) -> None:
        now_s = self._clock()
        if self._file is None or now_s - self._checked_at_s < _CHECK_EVERY_S:
            return
        self._checked_at_s = now_s
        if not self._file.has_changed():
            return
        try:
            self._install(self._file.read())
            log.info("API keys reloaded: %d keys", len(self._entries))
        except ValueError as error:
            log.error("%s; the previous keys remain in use", error)

    def _install(self, from_file: list[ApiKey]) -> None:
        keys = (*self._fixed, *from_file)
        check_distinct(keys)
        accounts = {account.name: account for _, account in self._entries}
        self._entries = tuple((key.digest, self._account(key, accounts.get(key.name))) for key in keys)
        for _, account in self._entries:
            account.is_only_one = len(keys) == 1

    def _account(self, key: ApiKey, before: Account | None) -> Account:
        if before is not None and (before.limits, before.role, before.owner) == (key.limits, key.role, key.owner):
            return before
        return Account(
            key.name,
            key.limits,
            self._clock,
            role=key.role,
            owner=key.owner,
            shares_caches=self._shares_caches,
            shared=self._shared,
        )


def bearer_token(headers: Mapping[str, bytes]) -> bytes | None:
    """The key in the Authorization header; None: no Bearer token."""
    scheme, _, token = headers.get("authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def presented_key(headers: Mapping[str, bytes], *, is_anthropic: bool) -> bytes | None:
    """The key of an HTTP request, from the Authorization header, which OpenAI's clients use, or `x-api-key`, which
    Anthropic's use; None: no key. is_anthropic: if both are present, `x-api-key` is used"""
    own = headers.get("x-api-key")
    if own is not None and (is_anthropic or "authorization" not in headers):
        return own
    return bearer_token(headers)
