"""Each function of the API, called by compiled code with right and wrong arguments: backends/every_function.cpp.

What they must give is in every_function.txt, by group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbackend.core.inference_server import InferenceServer
from tests.core.c_api.test_functions import NAMES, UNSUPPORTED
from tests.helpers.compiled_backends import SOURCES, TEXT_IO, CompiledRepository, ask, text_of
from tests.helpers.core_host import serving
from tests.helpers.waiting import eventually

EXPECTED = Path(__file__).with_name("every_function.txt").read_text()
GROUPS = dict(re.findall(r"^# (\w+)\n(.*?)\n\n", EXPECTED, re.DOTALL | re.MULTILINE))

ISOLATION = '"isolation":"process",'


@pytest.fixture
def server(backends: CompiledRepository) -> Iterator[InferenceServer]:
    backends.model("m", "every_function", io=TEXT_IO)
    with serving(backends, "m", backend_config={"every_function": {"a": "1"}}) as server:
        yield server


def test_all_groups(server: InferenceServer, backends: CompiledRepository) -> None:
    root = str(backends.models.parent)
    for group, expected in GROUPS.items():
        found = text_of(ask(server, group, id="r", parameters={"p": 1}))
        assert found.replace(root, "<root>").replace(ISOLATION, "").splitlines() == expected.splitlines(), group


def test_statistics_of_responses_and_batches(server: InferenceServer) -> None:
    """Those that the groups `factory` and `instance` report."""
    text_of(ask(server, "factory"))
    text_of(ask(server, "instance"))
    eventually(lambda: server.model_statistics("m")[0].batch_stats)
    statistics = server.model_statistics("m")[0]
    assert [(batch.batch_size, batch.compute_infer.ns) for batch in statistics.batch_stats] == [(3, 10)]
    assert sorted(statistics.response_stats) == ["0", "1"]
    good, bad = statistics.response_stats["0"], statistics.response_stats["1"]
    assert (good.success.count, good.success.ns, good.compute_output.ns) == (1, 3000, 2000)
    assert (bad.fail.count, bad.fail.ns, bad.success.count) == (1, 3000, 0)


def test_every_function_has_a_caller_in_the_test_backends() -> None:
    unsupported = set(re.findall(r"^UNSUPPORTED\((\w+)\)", UNSUPPORTED.read_text(), re.MULTILINE))
    called = "".join(file.read_text() for file in SOURCES.glob("*.cpp"))
    called += "".join(re.sub(r"^IMPORTED .*$", "", file.read_text(), flags=re.M) for file in SOURCES.glob("*.h"))
    assert sorted(name for name in set(NAMES) - unsupported if not re.search(rf"\b{name}\b", called)) == []
