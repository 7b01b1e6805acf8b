"""Agents' requests: conversations that grow with each turn, after system prompts shared by a tenant's agents.

For the comparison of policies and the simulation. Independent of engines and policies. Invariant: it follows from its
seed alone; what a turn adds to the text does not depend on what was generated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """new_tokens: what the user or a tool adds. think_s: from the end of the turn before to this one."""

    new_tokens: tuple[int, ...]
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    start_s: float
    tenant: str
    system_tokens: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Ranges are (smallest, largest), drawn evenly. A share of conversations is begun by several agents at once, which
    have the same first turn (fan_out of them)."""

    seed: int = 0
    num_conversations: int = 300
    num_tenants: int = 6
    agents_of_tenant: tuple[int, int] = (1, 3)
    system_tokens: tuple[int, int] = (256, 1536)
    turns: tuple[int, int] = (2, 10)
    new_tokens: tuple[int, int] = (32, 384)
    output_tokens: tuple[int, int] = (8, 48)
    mean_think_s: float = 4.0
    conversations_per_s: float = 1.0
    fan_out_share: float = 0.1
    fan_out: tuple[int, int] = (2, 5)


class Trace:
    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._draw = random.Random(settings.seed)

    def conversations(self) -> Iterator[Conversation]:
        """In the order of their starts."""
        settings, draw = self._settings, self._draw
        agents = [
            (f"tenant{tenant}", self._tokens(settings.system_tokens))
            for tenant in range(settings.num_tenants)
            for _ in range(draw.randint(*settings.agents_of_tenant))
        ]
        weights = [1 / (1 + rank) for rank in range(len(agents))]  # some agents are used much more than others
        start_s, count = 0.0, 0
        while count < settings.num_conversations:
            start_s += draw.expovariate(settings.conversations_per_s)
            tenant, system = draw.choices(agents, weights)[0]
            first = self._turn(0.0)
            copies = draw.randint(*settings.fan_out) if draw.random() < settings.fan_out_share else 1
            for _ in range(min(copies, settings.num_conversations - count)):
                count += 1
                others = tuple(
                    self._turn(draw.expovariate(1 / settings.mean_think_s))
                    for _ in range(draw.randint(*settings.turns) - 1)
                )
                yield Conversation(start_s, tenant, system, (first, *others))

    def _turn(self, think_s: float) -> Turn:
        return Turn(self._tokens(self._settings.new_tokens), self._draw.randint(*self._settings.output_tokens), think_s)

    def _tokens(self, count: tuple[int, int]) -> tuple[int, ...]:
        return tuple(self._draw.randbytes(self._draw.randint(*count)))
