"""Tells the program that started this server that it serves, and where.

For: programs that start servers (embedding/server.py). Does not know: them. They name a descriptor in the environment,
to which this server writes one line of JSON: the URL of each open endpoint by protocol. Invariant: child processes
inherit neither the name nor the descriptor; a program that no longer reads is no error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

READY_DESCRIPTOR: Final = "LLMBACKEND_READY_FD"
"""The variable with the descriptor's number."""


def take_ready_descriptor() -> int | None:
    """The descriptor that this process was given, once."""
    text = os.environ.pop(READY_DESCRIPTOR, "")
    if not text:
        return None
    try:
        os.set_inheritable(descriptor := int(text), False)
    except (ValueError, OSError):
        log.warning("%s is '%s', expected the number of an open descriptor", READY_DESCRIPTOR, text)
        return None
    return descriptor


def tell_ready(descriptor: int | None, urls: Mapping[str, str]) -> None:
    if descriptor is None:
        return
    try:
        with open(descriptor, "w") as pipe:
            pipe.write(json.dumps(dict(urls)) + "\n")
    except OSError as error:
        log.warning("the program that started this server was not told that it is ready: %s", error)
