"""What an engine's actor has of it, in a process of its own: `python -m tests.cluster.keeper_process FOLDER SECRETS`.

It keeps the engine `engine-0` until it is killed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from llmbackend.cluster.processes import EngineKeeper, Launch
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.process.served.served_order import ServedEngineOrder

NAME = "engine-0"


def launch(secrets: str) -> Launch:
    config = EngineConfig(model="mock", mock_step_ms=5.0)
    return Launch(ServedEngineOrder(config=config, secrets_folder=secrets, outlives_parent=True))


def main() -> None:
    folder, secrets = sys.argv[1:]
    EngineKeeper(lambda: launch(secrets), Path(folder), NAME, lambda news: None).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
