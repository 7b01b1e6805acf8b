"""The `checksum` repository agent: loads a model only if its files have the expected checksums.

Each parameter is one file: the key is `<algorithm>:<path in the model's directory>`, the value the digest in
hexadecimal. Algorithms are MD5 and SHA256, in any case. Source: Triton's checksum_repository_agent, which has only MD5;
its texts.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePath

from llmbackend.core.repoagent_api import Action, Agent, AgentModel, invalid_argument, unsupported

ALGORITHMS = {"md5": "MD5", "sha256": "SHA256"}


def TRITONREPOAGENT_ModelAction(agent: Agent, model: AgentModel, action: Action) -> None:
    if action is not Action.LOAD:
        return
    for key, expected in model.parameters.items():
        _check(model.location, key, expected)


def _check(directory: Path, key: str, expected: str) -> None:
    algorithm, colon, path = key.partition(":")
    if not colon:
        raise invalid_argument(f"failed to parse key: {key}")
    if algorithm.lower() not in ALGORITHMS:
        raise unsupported(f"Unsupported checksum algorithm: {algorithm}")
    got = _digest(directory, path, algorithm.lower())
    if got != expected.lower():
        name = ALGORITHMS[algorithm.lower()]
        raise invalid_argument(f"Mismatched {name} hash for file {path}, expect: {expected}, got: {got}")


def _digest(directory: Path, path: str, algorithm: str) -> str:
    if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        raise invalid_argument(f"file {path} is outside of the model's directory")
    try:
        with (directory / path).open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else type(error).__name__
        raise invalid_argument(f"failed to open text file for read {path}: {cause}") from None
