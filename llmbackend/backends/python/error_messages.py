"""The errors of this backend that Triton has words for.

For: everything here that fails a request or a load. Does not know: who reads them. Invariant: each begins with Triton's
text, so that whoever looks for that finds it.
"""

from __future__ import annotations

from llmbackend.core.backend_api import TritonError, internal


def not_healthy(name: str, cause: str) -> TritonError:
    """Triton's words, and then how it came to that, which Triton does not tell."""
    return internal(f"Stub process '{name}' is not healthy. {cause}".rstrip())


def execute_error(instance_name: str, text: str) -> TritonError:
    """The error of the requests of an execute call that raised."""
    return internal(f"Failed to process the request(s) for model '{instance_name}', message: {text}")
