"""The package `openvino`, imported with its telemetry disabled.

Its import sends an event to its makers through `openvino_telemetry`, if that can be imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from llmbackend.core.backend_api import unsupported


def _import() -> Any:
    """Raises TritonError UNSUPPORTED that says what to install."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None: it cannot be imported
    try:
        return importlib.import_module("openvino")
    except ImportError as error:
        raise unsupported(
            f"the openvino backend needs the package 'openvino': pip install 'llmbackend[openvino]' ({error})"
        ) from None


openvino: Any = _import()


def reason(error: Exception) -> str:
    """OpenVINO's message on one line, without source locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("Exception from ", "Check '")))
