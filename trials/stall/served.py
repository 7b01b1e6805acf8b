"""The server under attack: models for bystanders and for agents, and models that return what they are sent.

Used by the run. Independent of attacks. Invariant: it is one real `llmbackend serve` with the default limits, which
requires a key.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.server_process import ServerProcess, start_server, stop_server, write_mock_model

KEY = "of-all-clients-but-one"
STEADY = "steady"
AGENT = "agent"
"""Its chat template takes tools."""
DATATYPES = ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP32", "FP64", "BYTES")
_TEMPLATE = Path(__file__).resolve().parents[2] / "model_repository" / "demo" / "1" / "chat_template.jinja"
_ECHO = """
import time
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        start = time.monotonic_ns()
        x = request.inputs["IN"]
        response = request.new_response()
        response.add_output(Tensor("OUT", x.datatype, x.shape, x.data))
        response.send(ResponseFlag.FINAL)
        end = time.monotonic_ns()
        instance.report_statistics(request, True, start, start, end, end)
        request.release()
"""


@contextlib.contextmanager
def served(arguments: Sequence[str] = (), token_ms: float = 5) -> Iterator[ServerProcess]:
    """token_ms: of the bystanders' model. The server's log goes to standard error when the run raises."""
    with tempfile.TemporaryDirectory(prefix="llmbackend-stall-") as directory:
        repository, backends = Path(directory) / "models", Path(directory) / "backends"
        write_mock_model(repository, STEADY, mock_step_ms=token_ms, max_model_len=4096, num_kv_blocks=2048)
        template = _TEMPLATE.read_text()
        write_mock_model(repository, AGENT, chat_template=template, max_model_len=65536, num_kv_blocks=8192)
        for datatype in DATATYPES:
            _write_echo(repository, datatype)
        (backends / "echo").mkdir(parents=True)
        (backends / "echo" / "backend.py").write_text(_ECHO)
        keys, log_path = Path(directory) / "keys.txt", Path(directory) / "server.log"
        keys.touch(0o600)
        keys.write_text(f"all:{KEY} role=operator\n")
        try:
            with log_path.open("w") as log:
                server = start_server(
                    *("--model-repository", str(repository), "--backend-directory", str(backends)),
                    *("--model-control-mode", "explicit", "--load-model", "*", "--allow-client-shm=true"),
                    *("--api-key-file", str(keys)),
                    *arguments,
                    log=log,
                )
            try:
                yield server
            finally:
                if server.process.poll() is None:
                    stop_server(server)
        except BaseException:
            print(log_path.read_text(errors="replace")[-4000:])
            raise


def _write_echo(repository: Path, datatype: str) -> None:
    directory = repository / f"echo_{datatype}"
    (directory / "1").mkdir(parents=True)
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    (directory / "config.pbtxt").write_text(
        f'backend: "echo" input {{ name: "IN" data_type: {kind} dims: [ -1 ] }} '
        f'output {{ name: "OUT" data_type: {kind} dims: [ -1 ] }}\n'
    )
