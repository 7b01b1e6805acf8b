"""What vLLM's tests import from vLLM without testing it: tokenizers, platforms, versions. Anything else is a
placeholder that skips the test using it, because such a test is about vLLM's own code rather than a server."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

INSIDE = "about vLLM's own code, not about a server"


class _Anything(type):
    """A class whose use skips the test."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        pytest.skip(f"{cls.__name__}: {INSIDE}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


def _anything(name: str) -> Any:
    return _Anything(name, (Exception,), {})


def _get_tokenizer(*_arguments: Any, **_options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["LLMBACKEND_SUITE_MODEL"])


_KNOWN: dict[str, dict[str, Any]] = {
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.platforms": {
        "current_platform": SimpleNamespace(
            is_rocm=lambda: False, is_cuda=lambda: False, is_cpu=lambda: True, is_xpu=lambda: False,
            is_tpu=lambda: False, is_cuda_alike=lambda: False, device_type="cpu",
        )
    },
}  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name == "vllm" or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_KNOWN.get(module.__name__, {}))


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


sys.meta_path.insert(0, _Finder())
