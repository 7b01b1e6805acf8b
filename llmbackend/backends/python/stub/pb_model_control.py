"""`pb_utils.load_model`, `unload_model` and `is_model_ready`: a model that manages other models of the server.

For: model code. Does not know: repositories. Invariant: a refusal of the host is a TritonModelException with its text.
Source: Triton python_backend documentation, "Model Loading API".
"""

from __future__ import annotations

from collections.abc import Mapping

from .arguments import text
from .errors import TritonModelException
from .host_link import host

_PHASES_WITHOUT_CONTROL = ("load", "auto_complete", "finalize")
_FILE_PREFIX = "file:"


def load_model(
    model_name: str | bytes, config: str | bytes = "", files: Mapping[str | bytes, bytes | str] | None = None
) -> None:
    """Loads a model of the repository and waits for it. `config`: JSON that takes the place of its configuration;
    `files`: {"file:1/model.onnx": content}, which take the place of its directory."""
    parameters: dict[str, str | bytes] = {"config": text(config, "config")} if config else {}
    for path, content in (files or {}).items():
        name = text(path, "a name in files")
        if not name.startswith(_FILE_PREFIX) or not isinstance(content, (bytes, bytearray, str)):
            raise TritonModelException(f"files of load_model must be bytes under names '{_FILE_PREFIX}…', got {name!r}")
        parameters[name] = content.encode() if isinstance(content, str) else bytes(content)
    _ask("load_model", text(model_name, "model_name"), parameters)


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    """Begins to unload a model; returns at once."""
    _ask("unload_model", text(model_name, "model_name"), bool(unload_dependents))


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """Of one version, or of whichever the server chooses. False for a model that is unknown."""
    version = text(model_version, "model_version")
    if version and not version.isdecimal():
        raise TritonModelException(f"model_version must be a number as text, got {model_version!r}")
    return bool(_ask("is_model_ready", text(model_name, "model_name"), int(version) if version else -1))


def _ask(verb: str, *arguments: object) -> object:
    link = host(verb)
    if link.phase in _PHASES_WITHOUT_CONTROL:
        raise TritonModelException(f"{verb} is not supported during the '{link.phase}' function.")
    answer: object = link.ask(verb, *arguments)
    return answer
