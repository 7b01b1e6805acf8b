"""Runs one attack after the other and reports its effect on the bystanders.

Used by the command. Independent of how anything is printed. Invariant: an attack's period starts when its request is
sent and ends shortly after its answer; the next one starts when the streams are back to normal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import attacker, bystanders
from .attacks.attack import Attack
from .served import served
from .worker import Worker

ANSWER_S = 120.0
_MAKE_S = 120.0
_TOKEN_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Pace:
    """`undisturbed_s`: how long the bystanders are measured alone; `after_s`: how long after each answer; `token_ms`:
    how long a token of theirs takes."""

    undisturbed_s: float
    after_s: float = 0.3
    token_ms: float = 5


@dataclass(frozen=True)
class Felt:
    """`stall_s`: the slowest probe; `gap_s`: the longest wait for a token beyond the longest one without attacks."""

    attack: str
    answer: str
    took_s: float
    stall_s: float
    gap_s: float
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class Undisturbed:
    probe_s: float
    gap_s: float


def run(
    attacks: Sequence[Attack],
    *,
    size_bytes: int,
    pace: Pace,
    tell: Callable[[Felt], None],
    server_arguments: Sequence[str] = (),
) -> tuple[Undisturbed, list[Felt]]:
    """Calls `tell` after each attack. Raises TimeoutError when the bystanders do not come up."""
    with served(server_arguments, pace.token_ms) as server:
        beside = Worker(bystanders.main, server.http, server.grpc)
        sender = Worker(attacker.main, server.http, server.grpc, size_bytes, ANSWER_S)
        with beside, sender:
            assert beside.answer(60.0) == "ready"
            quiet = _undisturbed(beside, pace.undisturbed_s)
            felt: list[Felt] = []
            for attack in attacks:
                felt.append(_one(attack, beside, sender, quiet, pace.after_s))
                tell(felt[-1])
                if server.process.poll() is not None:
                    raise RuntimeError(f"the server ended with exit code {server.process.returncode}")
            return quiet, felt


def _undisturbed(beside: Worker, seconds: float) -> Undisturbed:
    _stretch(beside)
    time.sleep(seconds)
    quiet = _stretch(beside)
    return Undisturbed(quiet.worst_probe_s, quiet.worst_gap_s)


def _one(attack: Attack, beside: Worker, sender: Worker, quiet: Undisturbed, after_s: float) -> Felt:
    sender.tell(attack.name)
    assert sender.answer(_MAKE_S) == "ready"
    _stretch(beside)
    began_s = time.monotonic()
    sender.tell("go")
    answer: attacker.Answer = sender.answer(4 * ANSWER_S)
    took_s = time.monotonic() - began_s
    time.sleep(after_s)
    stretch = _stretch_with_token(beside)
    complaints = [*stretch.errors, *([answer.complaint] if answer.complaint else [])]
    if not stretch.tokens:
        complaints.append(f"no token came beside it, nor within {_TOKEN_S:.0f} s after it")
    gap_s = max(stretch.worst_gap_s - quiet.gap_s, 0.0)
    return Felt(attack.name, answer.text, took_s, stretch.worst_probe_s, gap_s, tuple(complaints))


def _stretch_with_token(beside: Worker) -> bystanders.Stretch:
    """Ends when a token has come, however slow the machine is: how long that took is the stretch's gap."""
    stretch, deadline_s = _stretch(beside), time.monotonic() + _TOKEN_S
    while not stretch.tokens and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        stretch = stretch.joined(_stretch(beside))
    return stretch


def _stretch(beside: Worker) -> bystanders.Stretch:
    beside.tell("take")
    stretch: bystanders.Stretch = beside.answer(60.0)
    return stretch
