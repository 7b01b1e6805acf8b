"""The server process that is fuzzed, and its health checks.

Used by the targets that use sockets. Independent of inputs. Invariant: `check` raises Finding if the process is gone,
its log contains a new traceback, or an ordinary request during the fuzzing is not answered in time.
"""

from __future__ import annotations

import contextlib
import http.client
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.server_process import ServerProcess, start_server, stop_server, write_mock_model

from .app_under_test import write_models
from .tally import Finding

HANG_S = 5.0
"""What a user would call a hang; most answers take milliseconds."""
BYSTANDER_MODEL = "steady"
MAX_MODEL_LEN = 1024
"""A request for more tokens than that is legal and generates so many: in a fraction of HANG_S, also on a busy machine
(0.6 ms per token on an idle one)."""


class FuzzedServer:
    def __init__(self, address: ServerProcess, log_path: Path) -> None:
        self.address = address
        self.log_path = log_path
        self._log = log_path.open(errors="replace")
        host, _, port = address.http.partition(":")
        self.http_host, self.http_port = host, int(port)

    def check(self) -> None:
        """Raises Finding."""
        code = self.address.process.poll()
        if code is not None:
            raise Finding("crash", f"the server ended with exit code {code}")
        if "Traceback (most recent call last)" in (new := self._log.read()):
            raise Finding("crash", "traceback in the log: " + new[new.index("Traceback") :][-500:])

    def check_answers(self) -> None:
        """Raises Finding unless GET /v2/health/live says 200 on a new connection."""
        connection = http.client.HTTPConnection(self.http_host, self.http_port, timeout=HANG_S)
        try:
            connection.request("GET", "/v2/health/live")
            status = connection.getresponse().status
        except TimeoutError:
            raise Finding("hang", "GET /v2/health/live is not answered") from None
        except OSError as error:
            raise Finding("crash", f"GET /v2/health/live: {error!r}") from None
        finally:
            connection.close()
        if status != 200:
            raise Finding("violation", f"GET /v2/health/live: {status}")

    def close(self) -> None:
        self._log.close()


@contextlib.contextmanager
def running() -> Iterator[FuzzedServer]:
    """A server with the models that inputs name, and one for the streams beside."""
    with tempfile.TemporaryDirectory(prefix="llmbackend-fuzz-") as directory:
        repository = Path(directory) / "models"
        write_models(repository, max_model_len=MAX_MODEL_LEN, num_kv_blocks=512)
        write_mock_model(repository, BYSTANDER_MODEL, mock_step_ms=5, num_kv_blocks=160, block_size=8)
        log_path = Path(directory) / "server.log"
        with log_path.open("w") as log:
            address = start_server(
                "--model-repository", str(repository), "--model-control-mode", "explicit", "--load-model", "*", log=log
            )
        fuzzed = FuzzedServer(address, log_path)
        try:
            yield fuzzed
        finally:
            fuzzed.close()
            if address.process.poll() is None:
                stop_server(address)
