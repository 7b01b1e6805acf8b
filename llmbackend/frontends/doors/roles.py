"""What the holder of an API key may do: the roles, and what only an operator may.

For: the doors, the key file and whoever serves requests that reach beyond their own. Does not know: paths, RPCs
(http_paths.py and grpc_door.py say which of them are an operator's). Invariant: a key without a role is a user's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from .restrictions import Category


class Role(StrEnum):
    USER = "user"
    OPERATOR = "operator"


OPERATORS_CATEGORIES: Final = frozenset({Category.TRACE, Category.LOGGING, Category.SHARED_MEMORY})
"""Of which nothing is a user's. Of the model repository its index is, and loading and unloading is not."""


def role_needed(name: str, role: Role, needed: Role = Role.OPERATOR) -> str:
    return f"This needs an API key with the role '{needed}'; the key '{name}' has the role '{role}'"
