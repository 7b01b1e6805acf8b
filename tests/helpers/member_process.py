"""A host of a cluster in its own process: `python -m tests.helpers.member_process ORDER`.

ORDER, in JSON: id, folder, repository, public, secret. It prints `serving ENDPOINT`; each line of its stdin is the list
of all hosts, [[id, endpoint]].
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from llmbackend.core.server_options import ServerOptions
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote.host_endpoint import HostEndpoint
from llmbackend.remote.wire import HostPeer
from llmbackend.server.frontend_settings import ClusterMember
from llmbackend.server.ports import Endpoint
from llmbackend.server.serve import run_server
from llmbackend.server.settings import ServerSettings


def main() -> int:
    order = json.loads(sys.argv[1])

    def on_serving(endpoints: Sequence[HostEndpoint]) -> None:
        print(f"serving {endpoints[-1].endpoint}", flush=True)
        threading.Thread(target=read_peers, args=(endpoints,), daemon=True).start()

    def read_peers(endpoints: Sequence[HostEndpoint]) -> None:
        for line in sys.stdin:
            peers = [HostPeer(id, endpoint) for id, endpoint in json.loads(line) if id != order["id"]]
            for endpoint in endpoints:
                endpoint.set_peers(peers)

    keys = ClusterSecrets(order["public"].encode(), order["secret"].encode())
    member = ClusterMember(host_id=order["id"], endpoint="tcp://127.0.0.1:0", keys=keys, on_serving=on_serving)
    free = Endpoint(address="127.0.0.1", port=0)
    settings = ServerSettings(
        options=ServerOptions(model_repositories=(Path(order["repository"]),)),
        http=free,
        grpc=free,
        metrics=free,
        host_folder=Path(order["folder"]),
    )
    return run_server(settings, member)


if __name__ == "__main__":
    sys.exit(main())
