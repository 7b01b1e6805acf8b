"""Compiled backends that are loaded and unloaded many times: neither memory, threads nor descriptors grow."""

from __future__ import annotations

import os

import pytest

from llmbackend.core.metric_api import process_memory
from tests.helpers.compiled_backends import DECOUPLED, TEXT_IO, CompiledRepository, ask
from tests.helpers.core_host import serving

pytestmark = pytest.mark.slow
WARM_UP, LOADS = 50, 300
GROWTH_BYTES = 4 << 20
"""13 KiB for each load."""


@pytest.mark.parametrize(
    ("backend", "config", "command"),
    [
        ("scripted", DECOUPLED, "stream 100"),
        ("streams", DECOUPLED, "two"),
        ("metrics", "", "make"),
        ("bls", "", "infer other parameters"),
        ("every_function", "", "factory"),
    ],
)
def test_memory_stays_level(inside: CompiledRepository, backend: str, config: str, command: str) -> None:
    inside.model("m", backend, config, io=TEXT_IO)
    inside.model("other", "scripted", io=TEXT_IO)
    with serving(inside, "other") as server:
        for load in range(WARM_UP + LOADS):
            if load == WARM_UP:
                before, descriptors = resident_bytes(), len(os.listdir("/proc/self/fd"))
            server.load_model("m")
            assert all(response.error is None for response in ask(server, command).responses())
            server.unload_model("m")
        assert resident_bytes() - before < GROWTH_BYTES
        assert len(os.listdir("/proc/self/fd")) == descriptors


def resident_bytes() -> int:
    (usage,) = process_memory(os.getpid())
    return usage.byte_size
