"""llmbackend: serve large language models the Triton way, in Python.

What a program embeds (docs/embedding.md) is imported when it is first used; type checkers find it in __init__.pyi.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "DEMO_MODEL": "llmbackend.demo",
    "DEMO_REPOSITORY": "llmbackend.demo",
    "Completion": "llmbackend.embedding.generation",
    "Engine": "llmbackend.embedding.engine",
    "Generation": "llmbackend.embedding.generation",
    "Logprob": "llmbackend.embedding.generation",
    "Prompt": "llmbackend.embedding.generation",
    "SamplingParams": "llmbackend.embedding.sampling_params",
    "Server": "llmbackend.embedding.server",
    "TritonError": "llmbackend.core.errors",
    "Usage": "llmbackend.embedding.generation",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'llmbackend' has no attribute '{name}'")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
