"""The folder with a cluster's secrets, the same on all machines: Ray's token, the certificate authority, the CURVE key.

Used by the launcher, the agent and `llmbackend cluster init`. Independent of how they are used. Invariants: only this
user can read the folder, because whoever has it can join the cluster; an existing folder is never changed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmbackend.links.secrets import CURVE_KEY, ClusterSecrets

from .settings import ClusterError

_TOKEN_BYTES: Final = 32
_MAX_TOKEN_BYTES: Final = 4096


@dataclass(frozen=True)
class SecretsFolder:
    path: Path

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def authority(self) -> Path:
        return self.path / "ca.pem"

    @property
    def authority_key(self) -> Path:
        return self.path / "ca.key"

    @property
    def curve_keys(self) -> ClusterSecrets:
        return ClusterSecrets.load(self.path)

    @property
    def key_name(self) -> str:
        """Identifies the CURVE key by a hash of its public half."""
        return hashlib.sha256(self.curve_keys.curve_public_key).hexdigest()[:12]

    @property
    def _files(self) -> tuple[Path, ...]:
        return self.token, self.authority, self.authority_key, self.path / CURVE_KEY

    @classmethod
    def create(cls, path: Path) -> SecretsFolder:
        """Raises ClusterError if the folder already contains secrets or cannot be written."""
        from .node_certificate import make_authority, write_private

        folder = cls(path.expanduser())
        try:
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if present := [file.name for file in folder._files if file.exists()]:
                raise ClusterError(
                    f"'{folder.path}' has {', '.join(present)} already: existing secrets are not replaced"
                )
            folder.path.chmod(0o700)
            write_private(folder.token, secrets.token_hex(_TOKEN_BYTES).encode())
            make_authority(folder.authority, folder.authority_key)
            ClusterSecrets.create(folder.path)
        except OSError as error:
            raise ClusterError(f"the cluster's secrets cannot be written to '{path}': {error.strerror}") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> SecretsFolder:
        """Raises ClusterError that names the file and its fault."""
        folder = cls(path.expanduser())
        if not folder.path.is_dir():
            raise ClusterError(
                f"the cluster's secrets are not in '{folder.path}': copy this folder from a machine of the cluster, or "
                f"make one with `llmbackend cluster init {folder.path}`"
            )
        for file in (folder.path, *folder._files):
            _check(file)
        if not folder.token.read_bytes()[:_MAX_TOKEN_BYTES].strip():
            raise ClusterError(f"'{folder.token}' is empty, expected the token of the cluster's Ray")
        try:
            ClusterSecrets.load(folder.path)
        except ValueError as error:
            raise ClusterError(str(error)) from None
        return folder

    @classmethod
    def open_or_create(cls, path: Path) -> SecretsFolder:
        return cls.open(path) if path.expanduser().is_dir() else cls.create(path)


def _check(file: Path) -> None:
    try:
        status = file.stat()
    except OSError as error:
        raise ClusterError(
            f"'{file}' of the cluster's secrets cannot be read ({error.strerror}): copy the whole folder from a "
            "machine of the cluster"
        ) from None
    if status.st_uid != os.getuid():
        raise ClusterError(f"'{file}' belongs to user {status.st_uid}, expected this process's, {os.getuid()}")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        wanted = "700" if stat.S_ISDIR(status.st_mode) else "600"
        raise ClusterError(
            f"other users can read the secret '{file}' (mode {stat.S_IMODE(status.st_mode):o}): chmod {wanted} '{file}'"
        )
