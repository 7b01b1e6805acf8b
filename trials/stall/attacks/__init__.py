"""The attacks, one file per interface."""

from __future__ import annotations

from .agents import AGENT_ATTACKS
from .attack import Attack
from .control import CONTROL_ATTACKS
from .generate import GENERATE_ATTACKS
from .grpc import GRPC_ATTACKS
from .http_infer import HTTP_INFER_ATTACKS
from .memory import MEMORY_ATTACKS
from .messages_api import MESSAGES_ATTACKS
from .openai import OPENAI_ATTACKS
from .responses_api import RESPONSES_ATTACKS
from .structures import STRUCTURE_ATTACKS

ATTACKS: tuple[Attack, ...] = (
    *HTTP_INFER_ATTACKS,
    *GENERATE_ATTACKS,
    *GRPC_ATTACKS,
    *MEMORY_ATTACKS,
    *OPENAI_ATTACKS,
    *AGENT_ATTACKS,
    *RESPONSES_ATTACKS,
    *MESSAGES_ATTACKS,
    *STRUCTURE_ATTACKS,
    *CONTROL_ATTACKS,
)
"""In the order in which they run."""

BY_NAME = {attack.name: attack for attack in ATTACKS}
assert len(BY_NAME) == len(ATTACKS), "two attacks have one name"
"""A worker process is told a name."""
