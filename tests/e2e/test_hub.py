"""`llmbackend serve ORG/NAME` against a stand-in of the hub on loopback: what is fetched, kept and said."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmbackend.demo import DEMO_REPOSITORY
from tests.helpers.server_process import post, start_server, stop_server

MODEL, COMMIT = "org/tiny", "a" * 40
RESOLVE = re.compile(rf"/{MODEL}/resolve/{COMMIT}/(.+)")


class Hub(ThreadingHTTPServer):
    """Serves one public model, and can break downloads of its weights."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.files |= {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
        self.asked: list[str] = []
        self.num_breaks = 0
        """So many of the next downloads of weights end in their middle."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path} {self.headers.get('range', '')}".strip())
        if path in (f"/api/models/{MODEL}/revision/main", f"/api/models/{MODEL}/revision/v1"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._send(200, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/{MODEL}/tree/{COMMIT}":
            self._send(200, json.dumps([_tree_entry(name, file) for name, file in self.server.files.items()]).encode())
        elif path.startswith(f"/api/models/{MODEL}/revision/"):
            self._send(404, b"{}", {"x-error-code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/gated"):
            self._send(403, b"{}", {"x-error-code": "GatedRepo"})
        elif (found := RESOLVE.fullmatch(path)) is not None and found[1] in self.server.files:
            self._send_file(found[1])
        else:
            self._send(404, b"{}", {"x-error-code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        content = self.server.files[name]
        etag = hashlib.sha256(content).hexdigest()
        begin = int(re.findall(r"\d+", self.headers.get("range", "bytes=0-"))[0])
        headers = {"etag": f'"{etag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        if begin:
            headers["content-range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        body = content[begin:]
        self.send_response(206 if begin else 200)
        for key, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name.endswith(".safetensors") and self.server.num_breaks:
            self.server.num_breaks -= 1
            self.close_connection = True
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "content-length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}
    return entry


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    server = Hub(DEMO_REPOSITORY / "demo" / "1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def environment(hub: Hub, home: Path, **variables: str) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}


def refused(*arguments: str, variables: dict[str, str]) -> str:
    """The last line of a command that does not start."""
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | variables, check=False)
    assert ended.returncode == 2, ended.stderr
    return ended.stderr.rstrip().splitlines()[-1]


def test_a_model_of_the_hub_is_fetched_once_also_over_connections_that_break(hub: Hub, tmp_path: Path) -> None:
    hub.asked.clear()
    hub.num_breaks = 1
    server = start_server(MODEL, "--revision=v1", "--device=cpu", variables=environment(hub, tmp_path))
    try:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
        status, answer = post(server, "/v1/completions", body)
        assert (status, json.loads(answer)["model"]) == (200, MODEL)
    finally:
        assert stop_server(server) == 0
    fetched = [line for line in hub.asked if line.startswith("GET") and "resolve" in line]
    assert [line.rpartition("/")[2] for line in fetched].count("model.safetensors") == 2
    assert not any("pytorch_model.bin" in line or "onnx" in line for line in fetched)

    # From the cache: without the hub, and without being asked.
    hub.asked.clear()
    server = start_server(MODEL, "--revision=v1", variables=environment(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert stop_server(server) == 0
    assert hub.asked == []


def test_files_that_are_there_are_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    hub.num_breaks = 99
    assert "cannot be fetched from the hub" in refused(MODEL, variables=environment(hub, tmp_path))
    hub.num_breaks = 0
    hub.asked.clear()
    assert stop_server(start_server(MODEL, variables=environment(hub, tmp_path))) == 0
    fetched = [line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "resolve" in line]
    assert fetched == ["model.safetensors"]


def test_a_folder_for_downloads(hub: Hub, tmp_path: Path) -> None:
    server = start_server(
        MODEL, "--download-dir", str(tmp_path / "here"), variables=environment(hub, tmp_path / "home")
    )
    assert stop_server(server) == 0
    assert list((tmp_path / "here").glob("models--org--tiny/snapshots/*/model.safetensors"))
    assert not (tmp_path / "home" / "hub").exists()
    shutil.rmtree(tmp_path / "here")


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (("org/none",), {}, "'org/none' is neither a directory here nor a model of the hub (http://127.0.0.1:"),
        (("org/gated",), {}, "'org/gated' is gated: accept its terms on the hub ("),
        ((MODEL, "--revision", "v9"), {}, "'org/tiny' has no revision 'v9' on the hub ("),
        ((MODEL,), {"HF_HUB_OFFLINE": "1"}, "'org/tiny' is not a directory here, and not in the cache '"),
        ((MODEL,), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub (http://127.0.0.1:9) cannot be reached"),
    ],
)
def test_what_cannot_be_fetched(
    hub: Hub, tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], reason: str
) -> None:
    assert reason in refused(*arguments, variables=environment(hub, tmp_path) | variables)
