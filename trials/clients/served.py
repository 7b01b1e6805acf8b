"""The server for the suites: the bundled model under three names, or a checkpoint of the user's.

Used by the command, and by the short form in `make test`. Independent of clients. Invariant: one real `llmbackend
serve` on loopback, ended however the suites went.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.server_process import ROOT, ServerProcess, start_server, stop_server

MODEL = "demo"
OTHER_MODEL = "other"
"""For clients that choose another model per request."""
ANTHROPIC_MODEL = "claude-3-haiku-20240307"
"""For clients that refuse a name which Anthropic's models do not have."""


@contextlib.contextmanager
def served(
    checkpoint: Path | None = None, names: tuple[str, ...] = (MODEL, OTHER_MODEL, ANTHROPIC_MODEL)
) -> Iterator[ServerProcess]:
    """Its log goes to standard output when what runs inside raises."""
    with tempfile.TemporaryDirectory(prefix="llmbackend-clients-") as directory:
        repository, log_path = Path(directory) / "models", Path(directory) / "server.log"
        for name in names:
            _write(repository / name, checkpoint)
        try:
            with log_path.open("w") as log:
                server = start_server("--model-repository", str(repository), log=log)
            try:
                yield server
            finally:
                stop_server(server)
        except BaseException:
            print(log_path.read_text(errors="replace")[-4000:])
            raise


def _write(model: Path, checkpoint: Path | None) -> None:
    bundled = ROOT / "model_repository" / "demo"
    if checkpoint is None:
        shutil.copytree(bundled, model)
        config = model / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "demo"', f'name: "{model.name}"'))
    else:
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text('backend: "llm"\n')
        (model / "1" / "model.json").write_text(json.dumps({"model": str(checkpoint.resolve())}))
