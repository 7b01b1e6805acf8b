"""Which models a name stands for: one, or with --model-namespacing one in each repository.

For: the server, whose clients know models by plain names. Does not know: repositories, states. Invariant: without
namespacing a model's key is its name, and every name stands for itself.
Source: ModelIdentifier and FindModelIdentifier in Triton's core.
"""

from __future__ import annotations

import threading
from typing import NewType

from llmbackend.core.errors import invalid_argument, not_found, shown_name

SEPARATOR = "::"
ModelIdentifier = NewType("ModelIdentifier", str)
"""The key of a model, unique in the server. A type of its own, so that a client's name is not mistaken for one."""


def identifier(namespace: str, name: str) -> ModelIdentifier:
    return ModelIdentifier(f"{namespace}{SEPARATOR}{name}" if namespace else name)


class ModelNames:
    """Any thread.

    With namespacing a name stands for the models that were read from a repository and not unloaded since. Triton's
    protocols cannot name a namespace: a name that several models share can be listed, loaded and unloaded, but not used
    for inference. A key is accepted wherever a name is, which ensembles use.
    """

    def __init__(self, is_namespacing: bool) -> None:
        self.is_namespacing = is_namespacing
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._keys: dict[str, set[str]] = {}

    def add(self, name: str, key: str) -> None:
        with self._lock:
            self._names[key] = name
            self._keys.setdefault(name, set()).add(key)

    def discard(self, key: str) -> None:
        with self._lock:
            name = self._names.pop(key, None)
            if name is not None:
                self._keys[name].discard(key)  # an empty set stays: the name was known

    def known(self) -> list[str]:
        """The keys of all models that were read and not unloaded."""
        with self._lock:
            return sorted(self._names)

    def plain(self, key: str) -> str:
        """The name in a key, known or not."""
        return key.rpartition(SEPARATOR)[2] if self.is_namespacing else key

    def namespace(self, key: str) -> str:
        """The namespace in a key; "" without namespacing."""
        return key.rpartition(SEPARATOR)[0] if self.is_namespacing else ""

    def keys(self, name: str) -> list[ModelIdentifier]:
        """The models that `name` (or a key) stands for."""
        if not self.is_namespacing:
            return [ModelIdentifier(name)]
        with self._lock:
            keys = {name} if name in self._names else self._keys.get(name, ())
            return [ModelIdentifier(key) for key in sorted(keys)]

    def key(self, name: str) -> ModelIdentifier:
        """The only model of that name. Raises TritonError with Triton's texts: INVALID_ARG for none or several,
        NOT_FOUND for one that was unloaded."""
        if not self.is_namespacing:
            return ModelIdentifier(name)
        keys = self.keys(name)
        if not keys and name in self._keys:
            raise not_found(f"Identifier of model '{name}' is not found in global map")
        if not keys:
            raise invalid_argument(f"Request for unknown model: '{shown_name(name)}' is not found")
        if len(keys) > 1:
            raise invalid_argument(
                f"There are {len(keys)} identifiers of model '{shown_name(name)}' in global map, model namespace must "
                f"be provided to resolve ambiguity."
            )
        return keys[0]
