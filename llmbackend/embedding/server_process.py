"""`python -m llmbackend.embedding.server_process FLAGS`: `llmbackend serve` that drains and exits when its standard
input closes."""

from __future__ import annotations

import os
import signal
import sys
import threading

from llmbackend.cli.main import main


def _stop_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, name="parent", daemon=True).start()
    sys.argv[1:] = ["serve", *sys.argv[1:]]
    main()
