"""Is there a Ray at an address, and is it of this cluster? Asked before Ray is, whose own attempts take minutes.

For: the Ray node. Does not know: Ray. Invariant: an answer within seconds.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Final

from .errors import ClusterError

TIMEOUT_S: Final = 5.0


def check_head(address: str, environment: Mapping[str, str]) -> None:
    """environment: as ray_environment. Raises ClusterError."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)
    except OSError as error:
        raise ClusterError(
            f"no Ray at {address}: {error.strerror or error}. Expected the address that the cluster's first machine "
            "shows (`llmbackend serve --cluster auto --cluster-bind ADDRESS`), and a port that is open between them"
        ) from error
    context = ssl.create_default_context(cafile=environment["RAY_TLS_CA_CERT"])
    context.load_cert_chain(environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"])
    context.set_alpn_protocols(["h2"])
    try:
        with connection, context.wrap_socket(connection, server_hostname=host):
            pass
    except ssl.SSLCertVerificationError as error:
        raise ClusterError(
            f"the Ray at {address} has a certificate of another cluster ({error.verify_message}): copy the secrets "
            f"folder of its first machine, here it is '{environment['LLMBACKEND_CLUSTER_SECRETS']}'"
        ) from error
    except OSError as error:
        raise ClusterError(
            f"what listens at {address} is no Ray with TLS: {error}. A cluster's nodes are started by "
            "`llmbackend serve --cluster`, or with the same RAY_TLS_… variables"
        ) from error
