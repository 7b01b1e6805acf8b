"""A substitute for the Hugging Face hub on loopback, with one public model under any name."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """Serves one public model, and can break downloads of its weights."""

    daemon_threads = True

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.files |= {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
        self.model = model
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        """Values of the Authorization header that came."""
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
        path, model = self.path.partition("?")[0], self.server.model
        self.server.tokens |= {value for value in (self.headers.get("authorization"),) if value}
        self.server.asked.append(f"{self.command} {path} {self.headers.get('range', '')}".strip())
        if path in (f"/api/models/{model}/revision/main", f"/api/models/{model}/revision/v1"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._send(200, json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/{model}/tree/{COMMIT}":
            self._send(200, json.dumps([_tree_entry(name, file) for name, file in self.server.files.items()]).encode())
        elif path.startswith(f"/api/models/{model}/revision/"):
            self._send(404, b"{}", {"x-error-code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/gated"):
            self._send(403, b"{}", {"x-error-code": "GatedRepo"})
        elif (found := re.fullmatch(rf"/{model}/resolve/{COMMIT}/(.+)", path)) is not None and found[
            1
        ] in self.server.files:
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


@contextmanager
def hub_of(folder: Path, model: str) -> Iterator[Hub]:
    """folder: with the files of the model"""
    server = Hub(folder, model)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def hub_environment(hub: Hub, home: Path, **variables: str) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
