"""Ray's own `ray` program without its client server, which would listen on a port and is not used here.

For: the Ray node (`python -m llmbackend.cluster.ray_program start …`). Does not know: what is started. Ray starts that
server where it can import grpc, and has no flag against it.
"""

from __future__ import annotations

import sys


def main() -> None:
    sys.modules["grpc"] = None  # type: ignore[assignment]  # as if it was not installed
    from ray.scripts.scripts import main as ray_main

    ray_main()


if __name__ == "__main__":
    main()
