"""Sends a model's files between machines: an actor on the machine that has them, read by a machine that lacks them.

Used by engines' actors. Independent of where copies are stored. Invariants: only the files of one manifest are sent,
and only while they match it; each part comes with its checksum; at most PARTS_AHEAD parts are in Ray's memory. Ray, and
hence TLS, carries them; tokens never take this path.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .model_cache import Fetch
from .model_manifest import ManifestFile, ModelManifest

PART_BYTES: Final = 4 << 20
PARTS_AHEAD: Final = 4
ANSWER_S: Final = 120.0
"""Timeout per answer. Ray detects a lost machine sooner."""


class ModelSource:
    """The actor."""

    def __init__(self, manifest: bytes) -> None:
        """manifest: a ModelManifest in msgpack."""
        self._manifest = msgspec.msgpack.decode(manifest, type=ModelManifest)

    def problem(self) -> str:
        """Why this machine cannot send the model; "" = it can."""
        path = self._manifest.path
        try:
            difference = self._manifest.difference(Path(path))
        except OSError as error:
            return f"{socket.gethostname()}: '{path}' cannot be read: {error.strerror}"
        return f"{socket.gethostname()}: '{path}' has changed: {difference}" if difference else ""

    def read(self, index: int, offset_bytes: int) -> tuple[bytes, bytes]:
        """A part of a file, and its checksum."""
        with (Path(self._manifest.path) / self._manifest.files[index].name).open("rb") as file:
            file.seek(offset_bytes)
            part = file.read(PART_BYTES)
        return part, hashlib.sha256(part).digest()


class RemoteModel:
    """Reads a ModelSource on another machine. For one thread."""

    def __init__(self, actor: Any, manifest: ModelManifest) -> None:
        self._actor = actor
        self._manifest = manifest

    def check(self) -> None:
        """Raises OSError if that machine no longer has the model."""
        if problem := self._ask(self._actor.problem.remote()):
            raise OSError(errno.ENOENT, problem)

    def fetch(self, file: ManifestFile) -> Iterator[bytes]:
        """The file's parts. Raises OSError."""
        index, asked = self._manifest.files.index(file), deque[Any]()
        for offset_bytes in range(0, file.size_bytes, PART_BYTES):
            asked.append(self._actor.read.remote(index, offset_bytes))
            if len(asked) == PARTS_AHEAD:
                yield self._part(file, asked.popleft())
        while asked:
            yield self._part(file, asked.popleft())
        if file == self._manifest.files[-1]:
            self.check()

    def close(self) -> None:
        ray.kill(self._actor)

    def _part(self, file: ManifestFile, answer: Any) -> bytes:
        part, checksum = self._ask(answer)
        if hashlib.sha256(part).digest() != checksum:
            raise OSError(errno.EIO, f"a part of {file.name} was damaged in transit")
        return bytes(part)

    def _ask(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            raise OSError(errno.EIO, f"the machine that has the model cannot send it: {error}") from error


@contextmanager
def remote_model(nodes: Iterable[str], manifest: ModelManifest) -> Iterator[Fetch]:
    """nodes: Ray's ids of machines that may have the model, best first. Raises OSError if none does."""
    problems = []
    with ExitStack() as connected:
        for node in nodes:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            actor = ray.remote(ModelSource).options(num_cpus=0, scheduling_strategy=strategy)
            model = RemoteModel(actor.remote(msgspec.msgpack.encode(manifest)), manifest)
            connected.callback(model.close)
            try:
                model.check()
            except OSError as error:
                problems.append(str(error.strerror))
            else:
                yield model.fetch
                return
    raise OSError(errno.ENOENT, "; ".join(problems) or "no machine is known to have it")
