"""Ray's `ray` program without its client server, which would listen on a port and has no flag to turn it off."""

from __future__ import annotations

import sys


def main() -> None:
    sys.modules["grpc"] = None  # type: ignore[assignment]  # as if it was not installed
    from ray.scripts.scripts import main as ray_main

    ray_main()


if __name__ == "__main__":
    main()
