"""--host-policy: threads and processes of instances run where their policy says, as the kernel shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from llmbackend.cli.flags.models import SchedulingFlags
from llmbackend.core.server_options import ServerOptions
from llmbackend.fork_server.host_policy import HostPolicy
from tests.helpers.core_host import STAGE, Repository, send, serving
from tests.helpers.waiting import eventually

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = CORES[0], CORES[-1]
POLICIES = ("first", f"cpu-cores={FIRST}-{FIRST}"), ("last", f"cpu-cores={LAST}-{LAST}"), ("last", "numa-node=0")
GROUPS = """
    instance_group { kind: KIND_CPU host_policy: "first" }
    instance_group { kind: KIND_CPU host_policy: "last" }
    instance_group { kind: KIND_CPU }
"""
NOTING = """
import os
from pathlib import Path
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag

def where(instance):
    is_bound = "bind:0" in Path(f"/proc/self/task/{__import__('threading').get_native_id()}/numa_maps").read_text()
    return instance.name, sorted(os.sched_getaffinity(0)), is_bound

def TRITONBACKEND_ModelInstanceInitialize(instance): STAGE.note(("initialize", *where(instance)))
def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(("execute", *where(instance)))
    STAGE.wait("go")
    for request in requests:
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
"""
HAS_NODES = Path("/sys/devices/system/node/node0").exists() and Path("/proc/self/numa_maps").exists()
pytestmark = pytest.mark.skipif(not HAS_NODES, reason="the kernel knows no NUMA nodes")


def policies(*texts: tuple[str, str]) -> dict[str, HostPolicy]:
    flags = SchedulingFlags(host_policy=[f"{name},{setting}" for name, setting in texts])
    return dict(flags.applied_to(ServerOptions()).host_policies)


def threads_of(pid: int) -> set[tuple[int, ...]]:
    return {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in Path(f"/proc/{pid}/task").iterdir()}


def is_bound_to_node(pid: int) -> bool:
    return "bind:0" in Path(f"/proc/{pid}/numa_maps").read_text()


def test_the_threads_of_instances_are_bound(repository: Repository) -> None:
    repository.backend("noting", NOTING)
    repository.model("m", "noting", GROUPS)
    with serving(repository, "m", host_policies=policies(*POLICIES)) as server:
        clients = [send(server, "m") for _ in range(3)]
        eventually(lambda: len(STAGE.events) == 6)
        STAGE.open("go")
        for client in clients:
            assert client.responses()
    places = {("m_0_0", (FIRST,), False), ("m_1_0", (LAST,), True), ("m_2_0", tuple(CORES), False)}
    for what in ("initialize", "execute"):
        noted: Any = [event[1:] for event in STAGE.events if event[0] == what]
        assert {(name, tuple(cores), is_bound) for name, cores, is_bound in noted} == places
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_a_group_without_a_name_has_the_policy_of_its_kind(repository: Repository) -> None:
    repository.backend("noting", NOTING)
    repository.model("m", "noting", "instance_group { kind: KIND_CPU } instance_group { kind: KIND_MODEL }")
    STAGE.open("go")
    with serving(repository, "m", host_policies=policies(("cpu", f"cpu-cores={FIRST}-{FIRST}"))):
        noted: Any = sorted(STAGE.events)
    assert [event[1:3] for event in noted] == [("m_0_0", [FIRST]), ("m_1_0", CORES)]


def test_a_policy_that_no_flag_sets_is_named_in_the_log(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    repository.backend("noting", NOTING)
    repository.model("m", "noting", 'instance_group { kind: KIND_CPU host_policy: "none" }')
    with serving(repository, "m"):
        assert "instance 'm_0_0': --host-policy sets no policy 'none'" in caplog.text


def test_the_processes_of_engines_are_bound(tmp_path: Path) -> None:
    """Of one configuration, and so from one fork server: each is bound by itself, and again when it has died."""
    from llmbackend.core.inference_server import InferenceServer
    from tests.helpers.llm_host import MODEL, write_model

    write_model(tmp_path, GROUPS, transport="process")
    server = InferenceServer(
        ServerOptions(model_repositories=(tmp_path,), model_control_mode="none", host_policies=policies(*POLICIES))
    )
    server.start()

    def places() -> list[Any]:
        found = []
        for instance in sorted(server_instances(server, MODEL), key=lambda one: one.name):
            pid = instance.describe().pid or 0
            found.append((threads_of(pid), is_bound_to_node(pid)) if pid else None)
        return found

    try:
        expected = [({(FIRST,)}, False), ({(LAST,)}, True), ({tuple(CORES)}, False)]
        assert places() == expected
        dead = [instance.kill() for instance in server_instances(server, MODEL)]
        eventually(lambda: not {i.describe().pid for i in server_instances(server, MODEL)} & {None, *dead}, 20)
        assert places() == expected
    finally:
        assert server.stop(20)


def server_instances(server: Any, model: str) -> tuple[Any, ...]:
    from tests.helpers.core_host import version_of

    return version_of(server, model).instances


def test_the_processes_of_python_models_are_bound(tmp_path: Path) -> None:
    from llmbackend.core.backend_api import Tensor
    from tests.helpers.python_host import Host

    code = """
import json, os
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        place = [sorted(os.sched_getaffinity(0)), "bind:0" in Path("/proc/self/numa_maps").read_text()]
        output = pb_utils.Tensor("PLACE", np.array([json.dumps(place).encode()], dtype=object))
        return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
    config = """
        backend: "python" instance_group { kind: KIND_CPU host_policy: "last" }
        input { name: "X" data_type: TYPE_STRING dims: 1 } output { name: "PLACE" data_type: TYPE_STRING dims: 1 }
    """
    host = Host(tmp_path / "models", host_policies=policies(*POLICIES))
    try:
        host.load("m", config, code)
        response = host.infer("m", [Tensor.text("X", "")]).one()
        assert response.error is None, response.error
        assert json.loads(response.outputs[0].data[0]) == [[LAST], True]
    finally:
        assert host.server.stop(20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p1", "option format is '<policy_name>,<setting>=<value>'. Got p1"),
        ("p1,cores=0-1", "setting 'cores' is unknown, expected numa-node or cpu-cores"),
        ("p1,cpu-cores=3", "format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got '3'"),
        ("p1,cpu-cores=0-900", "expected cores that this process may use: "),
        ("p1,cpu-cores=2-1", "Got '2-1'"),
        ("p1,numa-node=x", "setting 'numa-node' is 'x', expected the number of a node"),
        ("p1,numa-node=900", "setting 'numa-node' is 900, expected a node of this machine: 0"),
    ],
)
def test_a_wrong_policy_ends_the_command_with_the_flag_and_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        SchedulingFlags(host_policy=[text]).applied_to(ServerOptions())
    assert refused.value.param_hint == "--host-policy" and message in refused.value.message
