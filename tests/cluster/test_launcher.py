"""`serve --cluster` until it would start Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

KILLED = """
import os, sys
from pathlib import Path
from llmbackend.fork_server.process_resources import OwnedFolder
kept = OwnedFolder("host", Path(sys.argv[1]))
os._exit(9)
"""


def test_what_a_killed_launcher_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container, each start has the same process id."""
    run_folder, secrets = tmp_path / "run", tmp_path / "secrets"
    run_folder.mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, str(run_folder)], check=False).returncode == 9
    assert list(run_folder.glob("host-*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        own = ("--cluster", "auto", "--cluster-secrets", str(secrets), "--cluster-run-folder", str(run_folder))
        ports = ("--http-address", "127.0.0.1", "--http-port", port, "--grpc-port", "0", "--metrics-port", "0")
        serve = (sys.executable, "-m", "llmbackend.cli", "serve", *own, *ports, "--model", "mock")
        ended = subprocess.run(
            ["sh", "-c", f'mkdir -p "{run_folder}/host-$$" && exec "$@"', "sh", *serve],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=os.environ | {"NO_COLOR": "1"},
        )
    assert ended.returncode == 1, ended.stderr
    assert "cannot listen: " in ended.stderr and port in ended.stderr
    assert "File exists" not in ended.stderr
    left = [path.name for path in run_folder.glob("host-*")]
    assert len(left) == 1 and left[0][5:].isdigit(), "the command's own folder is removed, and that of a killed one"
