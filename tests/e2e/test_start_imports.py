"""Which modules a command imports, and when: what a start waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

NEVER = ("torch", "transformers", "safetensors", "redis", "tests")
"""What the process of a server with default flags never needs."""
AFTER_THE_ORDER = (
    "fastapi",
    "jinja2",
    "llmbackend.adapter.structured_outputs.compilation",
    "llmbackend.frontends.grpc.server",
    "llmbackend.frontends.http_app",
    "llmbackend.frontends.openai.schema",
    "uvicorn",
)
"""What is imported while the engine starts."""
HELP = """
import json, sys
from llmbackend.cli.main import main
try:
    main()
except SystemExit:
    print()
    print(json.dumps(sorted(sys.modules)))
"""
SERVE = """
import json, logging, os, signal, sys

def at_order(record):
    if not seen:
        seen.append(sorted(sys.modules))
    return True

def at_ready(record):
    if record.getMessage().startswith("Started Metrics Service"):
        seen.append(sorted(sys.modules))
        os.kill(os.getpid(), signal.SIGTERM)
    return True

seen = []
logging.getLogger("llmbackend.engine.load_progress").addFilter(at_order)
logging.getLogger("llmbackend.server.terminal").addFilter(at_ready)
from llmbackend.cli.main import main
from llmbackend.server import terminal
terminal.ORDER_TIMEOUT_S = 60
try:
    main()
except SystemExit:
    print()
    print(json.dumps(seen))
"""


def last_line(code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_help_and_the_version_import_nothing_of_a_server(argument: str) -> None:
    modules = set(last_line(HELP, argument))
    own = {name.removeprefix("llmbackend.cli") for name in modules if name.startswith("llmbackend.")}
    assert own == {"", ".main", ".command_line"}
    assert not modules & {"numpy", "grpc", "zmq", "msgspec"}


def test_engines_are_ordered_before_the_frontends_are_imported() -> None:
    ports = [
        f"--{protocol}-{what}" for protocol in ("http", "grpc", "metrics") for what in ("port=0", "address=127.0.0.1")
    ]
    at_order, at_ready = map(set, last_line(SERVE, "serve", "--model", "mock", *ports))
    assert not at_order & set(AFTER_THE_ORDER)
    assert set(AFTER_THE_ORDER) <= at_ready, "a name in the list is wrong"
    assert not at_ready & set(NEVER)
