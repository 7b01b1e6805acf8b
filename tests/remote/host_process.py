"""A host in a process of its own: `python -m tests.remote.host_process ENDPOINT REPOSITORY`. Ends with its stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.remote.host_endpoint import HostEndpoint


def main() -> None:
    server = InferenceServer(ServerOptions(model_repositories=(Path(sys.argv[2]),)))
    server.start()
    endpoint = HostEndpoint(server, sys.argv[1], host_id=sys.argv[1])
    endpoint.start()
    print("ready", flush=True)
    sys.stdin.read()
    endpoint.leave()
    server.stop(30)
    endpoint.close()


if __name__ == "__main__":
    main()
