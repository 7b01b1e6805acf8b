"""The package `openvino`, imported so that the server reports nothing to anyone.

Its import sends an event to its makers through `openvino_telemetry`, its dependency, unless that cannot be imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from llmbackend.core.backend_api import unsupported


def _import() -> Any:
    """Raises TritonError UNSUPPORTED naming what to install."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None: it cannot be imported
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise unsupported(
            f"the openvino backend needs the package 'openvino': pip install 'llmbackend[openvino]' ({error})"
        ) from None


openvino: Any = _import()


def reason(error: Exception) -> str:
    """OpenVINO's words in one line, without the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Exception from ", "Check '")))
