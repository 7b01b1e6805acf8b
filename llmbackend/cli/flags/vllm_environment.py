"""Environment variables of vLLM. Those with a flag here apply unless the flag is given; a warning names the others.

VLLM_API_KEY is read with the other keys (clients.py). Kubernetes sets further variables for a service named vllm.
Source: vLLM 0.33, vllm/envs.py and vllm/platforms/cpu.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llmbackend.core.gpus import supported_gpus

from ..command_line import bad_option
from .observability import LOG_LEVELS

_KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
_BATCH_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
_LOG_LEVEL: Final = "VLLM_LOGGING_LEVEL"
_READ: Final = (_KV_SPACE, _BATCH_INVARIANT, _LOG_LEVEL, "VLLM_API_KEY")
_OF_KUBERNETES: Final = re.compile("VLLM(_.*)?_(SERVICE|PORT)(_.*)?")


def engine_arguments(environ: Mapping[str, str]) -> dict[str, Any]:
    """Raises BadParameter that names the variable."""
    found: dict[str, Any] = {}
    space = environ.get(_KV_SPACE, "")
    if space and not space.isdecimal():
        raise bad_option(_KV_SPACE, f"{_KV_SPACE} is '{space}', expected a whole number of GiB")
    if int(space or 0) and not supported_gpus():
        found["kv_cache_memory_bytes"] = str(int(space) << 30)
    if environ.get(_BATCH_INVARIANT, "") == "1":
        found["batch_invariant"] = True
    return found


def log_level(environ: Mapping[str, str]) -> str:
    """A value of --log-level, or ""."""
    level = environ.get(_LOG_LEVEL, "").lower()
    return level if level in LOG_LEVELS else ""


def warnings(environ: Mapping[str, str]) -> Iterator[str]:
    inert = [
        name
        for name in sorted(environ)
        if name.startswith("VLLM_") and name not in _READ and not _OF_KUBERNETES.fullmatch(name)
    ]
    if inert:
        yield f"environment variables without effect here: {', '.join(inert)}"
