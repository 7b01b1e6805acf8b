"""Processes of a cluster, found from the outside.

Used by clusters. Independent of the processes' purpose. Invariant: a process that ends during the search is not
reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil

WHOLE_TIMEOUT_S = 120.0
"""On a machine with other work a host takes ten seconds to start."""


def children_of(pid: int, mark: str) -> list[psutil.Process]:
    """Live processes below `pid` whose command line contains `mark`, oldest first."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if mark in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append((child.create_time(), child.pid, child))
        except psutil.Error:
            continue
    return [child for _, _, child in sorted(found)]


def is_listening(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(is_true: Callable[[], bool], what: str, timeout_s: float = WHOLE_TIMEOUT_S) -> None:
    """Raises TimeoutError that names `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not is_true():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise TimeoutError(f"not so after {timeout_s:g} s: {what}") from None


async def until_in_thread(
    is_true: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = WHOLE_TIMEOUT_S
) -> None:
    """As `until`, of a question that blocks."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(is_true):
                await asyncio.sleep(0.1)
    except TimeoutError:
        shown = what if isinstance(what, str) else f"nothing is missing; missing: {what()}"
        raise TimeoutError(f"not so after {timeout_s:g} s: {shown}") from None
