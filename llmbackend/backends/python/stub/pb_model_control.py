"""`pb_utils.load_model`, `unload_model` and `is_model_ready`: a model that manages other models of the server.

For: model code. Does not know: repositories. Invariant: a refusal of the host is a TritonModelException with its text.
Source: Triton python_backend documentation, "Model Loading API".
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import TritonModelException
from .host_link import host

_PHASES_WITHOUT_CONTROL = ("load", "auto_complete", "finalize")
_FILE_PREFIX = "file:"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads a model of the repository and waits for it. `config`: JSON that takes the place of its configuration;
    `files`: {"file:1/model.onnx": content}, which take the place of its directory."""
    parameters: dict[str, str | bytes] = {"config": str(config)} if config else {}
    for path, content in (files or {}).items():
        if not str(path).startswith(_FILE_PREFIX) or not isinstance(content, bytes):
            raise TritonModelException(f"files of load_model must be bytes under names '{_FILE_PREFIX}…', got {path!r}")
        parameters[str(path)] = bytes(content)
    _ask("load_model", str(model_name), parameters)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begins to unload a model; returns at once."""
    _ask("unload_model", str(model_name), bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Of one version, or of whichever the server chooses. False for a model that is unknown."""
    version = str(model_version)
    if version and not version.isdecimal():
        raise TritonModelException(f"model_version must be a number as text, got {model_version!r}")
    return bool(_ask("is_model_ready", str(model_name), int(version) if version else -1))


def _ask(verb: str, *arguments: object) -> object:
    link = host(verb)
    if link.phase in _PHASES_WITHOUT_CONTROL:
        raise TritonModelException(f"{verb} is not supported during the '{link.phase}' function.")
    answer: object = link.ask(verb, *arguments)
    return answer
