"""The environment of everything that speaks to a cluster's Ray: token, TLS, and what Ray should not do.

For: the Ray node and the agent. Does not know: when they start. Invariant: nothing here speaks to a Ray without the
cluster's token and certificates. Ray reads variables when it is imported, so that they are set before a process starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from .secrets_folder import SecretsFolder
from .settings import LOOPBACK

SECRETS_VARIABLE: Final = "LLMBACKEND_CLUSTER_SECRETS"
RUN_FOLDER_VARIABLE: Final = "LLMBACKEND_CLUSTER_RUN_FOLDER"
"""What engines' actors find on each machine: they inherit its node's environment."""
NODE_DRAIN_S: Final = "1"
"""Engines need none: their hosts are served until others have taken their place."""
THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


def ray_environment(secrets: SecretsFolder, run_folder: Path, bind: str) -> dict[str, str]:
    """Writes this machine's certificate. Raises OSError or ValueError as `issue`."""
    from .node_certificate import issue

    certificate, key = run_folder / "node.pem", run_folder / "node.key"
    issue(secrets.authority, secrets.authority_key, bind, certificate, key)
    found = dict(os.environ)
    found.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    found |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(secrets.token.resolve()),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(secrets.authority.resolve()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": NODE_DRAIN_S,
        THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, "1"),
        SECRETS_VARIABLE: str(secrets.path.resolve()),
        RUN_FOLDER_VARIABLE: str(run_folder),
    }
    if bind == LOOPBACK:
        # The only way to a node that listens at loopback alone: otherwise Ray takes another address of the machine.
        found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return found
