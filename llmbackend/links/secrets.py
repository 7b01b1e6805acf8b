"""The CURVE key for a cluster's ZeroMQ links over TCP, stored in a folder on each of its machines.

All servers and clients of the cluster share one key pair. Invariants: a secured link accepts nobody without the key;
the secret key never appears in a message, log or error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq

CURVE_KEY: Final = "curve.key"
"""A file that contains the secret key in z85, 40 characters; the public key is derived from it."""
_KEY_CHARACTERS: Final = 40
_MAX_FILE_BYTES: Final = 1 << 12


@dataclass(frozen=True)
class ClusterSecrets:
    """Both keys in z85."""

    curve_public_key: bytes = field(repr=False)
    curve_secret_key: bytes = field(repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> ClusterSecrets:
        """Raises ValueError that names the file and its fault."""
        path = Path(folder) / CURVE_KEY
        try:
            with path.open("rb") as file:
                secret = file.read(_MAX_FILE_BYTES).strip()
        except OSError as error:
            raise ValueError(f"the cluster's CURVE key '{path}' cannot be read: {error.strerror}") from error
        try:
            if len(secret) != _KEY_CHARACTERS:
                raise ValueError
            return cls(zmq.curve_public(secret), secret)
        except (ValueError, zmq.ZMQError):
            raise ValueError(
                f"'{path}' is not a CURVE key ({len(secret)} bytes), expected {_KEY_CHARACTERS} characters of z85"
            ) from None

    @classmethod
    def create(cls, folder: str | Path) -> ClusterSecrets:
        """Creates the key, readable only by this user. Raises FileExistsError if there is one."""
        public, secret = zmq.curve_keypair()
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(Path(folder) / CURVE_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret + b"\n")
        return cls(public, secret)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """To be called before it connects."""
        socket.curve_serverkey = self.curve_public_key
        socket.curve_publickey, socket.curve_secretkey = self.curve_public_key, self.curve_secret_key

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """To be called before it binds. Its context needs a `ClientCheck`."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.curve_public_key, self.curve_secret_key


class ClientCheck:
    """Refuses clients without the cluster's key on all secured servers of a context, on its own thread."""

    def __init__(self, context: zmq.Context[Any], public_key: bytes) -> None:
        """public_key: the cluster's, in z85."""
        from zmq.auth.thread import ThreadAuthenticator

        self._key = public_key
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq. key: the client's public key in z85."""
        return key == self._key

    def close(self) -> None:
        """To be called before the context is terminated."""
        self._authenticator.stop()
