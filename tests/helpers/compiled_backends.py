"""The test backends in C++ (tests/core/c_api/backends), compiled when a test first needs them, and their requests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import IDENTITY_IO, Client, Repository, send

SOURCES = Path(__file__).parents[1] / "core" / "c_api" / "backends"
TEXT_IO = """
input [ { name: "INPUT0" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
NUMBER_IO = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
FLAGS = os.environ.get("LLMBACKEND_TEST_BACKEND_FLAGS", "").split()
"""More flags of the compiler, to run the tests with its sanitizers."""


class Libraries:
    """The compiled libraries, in one folder that the test workers share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def library(self, name: str) -> Path:
        """Of <name>.cpp. A worker that compiles what another compiles, too, replaces an equal file."""
        library = self._folder / f"libtriton_{name}.so"
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            command = ["g++", "-std=c++20", "-O0", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden"]
            subprocess.run([*command, *FLAGS, "-o", str(made), str(SOURCES / f"{name}.cpp")], check=True)
            made.replace(library)
        return library


class CompiledRepository(Repository):
    """A repository whose backend directory has the test backends that its models name, where Triton looks for them."""

    def __init__(self, root: Path, libraries: Libraries) -> None:
        super().__init__(root)
        self._libraries = libraries
        self.backend_config: dict[str, dict[str, str]] = {}
        """Settings of the server, by backend; a test adds its own."""

    def options(self, **options: Any) -> ServerOptions:
        config = {**self.backend_config, **options.pop("backend_config", {})}
        return super().options(backend_config=config, **options)

    def model(
        self, name: str, backend: str, config: str = "", versions: tuple[int | str, ...] = (1,), io: str = IDENTITY_IO
    ) -> Path:
        folder = self.backends / backend
        if not folder.exists() and (SOURCES / f"{backend}.cpp").exists():
            folder.mkdir()
            library = self._libraries.library(backend)
            (folder / library.name).symlink_to(library)
        return super().model(name, backend, config, versions, io)


def ask(server: InferenceServer, command: str, model: str = "m", **fields: Any) -> Client:
    """Sends a text to a test backend."""
    return send(server, model, Tensor.text("INPUT0", command), **fields)


def text_of(client: Client) -> str:
    (response,) = client.responses()
    assert response.error is None, response.error
    return str(response.outputs[0].data.item().decode())


def numbers(*values: int) -> Tensor:
    return Tensor.of("INPUT0", np.array(values, np.int32))
