"""What the doors of a server are told, as the command line reads it.

For: `ServerSettings`. Does not know: flags, keys themselves (files and the environment are read when the doors open).
Invariant: what is here has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .rate_limit import NO_LIMITS, Limits
from .restrictions import NO_RESTRICTIONS, Restrictions
from .tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """`default_limits` are those of keys that have none of their own. `share_caches`: what is computed for one key is
    found by others. No source of keys: everybody may enter."""

    api_key_file: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    environment_keys: str = field(default="", repr=False)
    default_limits: Limits = NO_LIMITS
    share_caches: bool = False
    http_restrictions: Restrictions = NO_RESTRICTIONS
    grpc_restrictions: Restrictions = NO_RESTRICTIONS
    http_tls: TlsFiles | None = None
    grpc_tls: TlsFiles | None = None
    log_requests: bool = False

    @property
    def needs_keys(self) -> bool:
        return bool(self.api_key_file or self.api_keys or self.environment_keys.strip())


NO_DOORS: Final = DoorSettings()
