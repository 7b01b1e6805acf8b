"""The backend's `parameters`, from a model configuration or, for all models, from --backend-config=openvino,KEY=VALUE.

Source: the parameters of Triton's OpenVINO backend. Not in Triton: defaults for all models; switches accept no values
other than YES and NO.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmbackend.core.backend_api import Model

from ..array_backend import boolean, read_parameters

_log = logging.getLogger(__name__)


def _switch(text: str) -> bool:
    values = {"yes": True, "no": False}
    try:
        return values[text.lower()] if text.lower() in values else boolean(text)
    except ValueError:
        raise ValueError("expected YES or NO") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a number of at least 0")
    return int(text)


def _one_of(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.upper() not in values:
            raise ValueError(f"expected {' or '.join(values)}")
        return text.upper()

    return read


def _streams(text: str) -> int | str:
    if text.upper() in ("AUTO", "NUMA"):
        return text.upper()
    if not text.isdecimal():
        raise ValueError("expected AUTO, NUMA or a number")
    return int(text)


def _bf16(text: str) -> str:
    _one_of("YES")(text)
    return "bf16"


_PROPERTIES = {
    "COMPILATION_NUM_THREADS": "COMPILATION_NUM_THREADS",
    "HINT_BF16": "INFERENCE_PRECISION_HINT",
    "INFERENCE_NUM_THREADS": "INFERENCE_NUM_THREADS",
    "NUM_STREAMS": "NUM_STREAMS",
    "PERFORMANCE_HINT": "PERFORMANCE_HINT",
}
"""Parameter → OpenVINO's device property."""
_READERS: Mapping[str, Callable[[str], Any]] = {
    "COMPILATION_NUM_THREADS": _count,
    "CPU_EXTENSION_PATH": str,
    "ENABLE_BATCH_PADDING": _switch,
    "HINT_BF16": _bf16,
    "INFERENCE_NUM_THREADS": _count,
    "NUM_STREAMS": _streams,
    "PERFORMANCE_HINT": _one_of("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT"),
    "RESHAPE_IO_LAYERS": _switch,
    "SKIP_OV_DYNAMIC_BATCHSIZE": _switch,
    "TARGET_DEVICE": str,
}


@dataclass(frozen=True)
class Settings:
    """device           OpenVINO's name
    properties       of the device
    extension        file of a library with additional operations; "" = none
    pads_batch       whether batches are padded with zero rows to max_batch_size
    fixes_batch      whether the program is compiled for max_batch_size rows
    reshapes         whether inputs have the configuration's dimensions rather than the model's
    """

    device: str
    properties: Mapping[str, Any]
    extension: str
    pads_batch: bool
    fixes_batch: bool
    reshapes: bool

    @classmethod
    def of(cls, model: Model) -> Settings:
        """Raises TritonError INVALID_ARG that names the parameter."""
        config = model.config
        for key in (_READERS.keys() & model.backend.config.keys()) - config.parameters.keys():
            config.parameters[key].string_value = model.backend.config[key]
        found = read_parameters(config, _READERS)
        pads = found.get("ENABLE_BATCH_PADDING", False)
        return cls(
            device=found.get("TARGET_DEVICE", "CPU"),
            properties={name: found[key] for key, name in _PROPERTIES.items() if key in found},
            extension=found.get("CPU_EXTENSION_PATH", ""),
            pads_batch=pads,
            fixes_batch=pads or found.get("SKIP_OV_DYNAMIC_BATCHSIZE", False),
            reshapes=found.get("RESHAPE_IO_LAYERS", False),
        )

    def supported_properties(self, core: Any, model: str) -> dict[str, Any]:
        """The properties supported by the device; logs the others."""
        known = core.get_property(self.device.partition(":")[0], "SUPPORTED_PROPERTIES")
        for name in self.properties.keys() - known:
            _log.warning("model '%s': the device %s has no property %s", model, self.device, name)
        return {name: value for name, value in self.properties.items() if name in known}
