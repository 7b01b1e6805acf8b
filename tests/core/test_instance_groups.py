"""Instance groups on a host with GPUs: kinds, GPUs, names and refusals, as NormalizeInstanceGroup and
ValidateInstanceGroup of Triton's core have them. The host's GPUs are a stand-in: nothing here computes."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from llmbackend.core.backend_api import InstanceGroupKind
from llmbackend.core.config.model_config import parse_text, set_instance_groups
from llmbackend.core.errors import TritonError
from llmbackend.core.gpus import DriverGpu, HostGpus, driver_gpus, supported_gpus, visible_gpus
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_backends import INSTANCE_BACKEND, load_error
from tests.helpers.core_host import Repository, send, serving, version_of
from tests.helpers.waiting import eventually

Group = tuple[str, str, int, list[int]]


def completed(
    groups: str, gpus: tuple[int, ...], *preferred: tuple[InstanceGroupKind, int], backend: str = "b"
) -> list[Group]:
    config = parse_text(f'name: "m" backend: "{backend}" {groups}', "t")
    set_instance_groups(config, preferred, gpus)
    return [(group.name, group.Kind.Name(group.kind), group.count, list(group.gpus)) for group in config.instance_group]


def test_a_model_without_groups_runs_on_every_gpu_or_on_the_processor() -> None:
    assert completed("", (0, 2)) == [("m", "KIND_GPU", 1, [0, 2])]
    assert completed("", ()) == [("m", "KIND_CPU", 1, [])]


def test_the_backends_first_usable_preference_counts_when_there_are_no_groups() -> None:
    preferred = ((InstanceGroupKind.GPU, 3), (InstanceGroupKind.MODEL, 2))
    assert completed("", (0, 1), *preferred) == [("m", "KIND_GPU", 3, [0, 1])]
    assert completed("", (), *preferred) == [("m", "KIND_MODEL", 2, [])]
    assert completed("instance_group { kind: KIND_MODEL }", (), *preferred) == [("m_0", "KIND_MODEL", 2, [])]


def test_kind_auto_is_gpu_only_where_all_listed_gpus_are() -> None:
    assert completed("instance_group { gpus: [1] count: 2 }", (0, 1)) == [("m_0", "KIND_GPU", 2, [1])]
    assert completed("instance_group { gpus: [1, 7] }", (0, 1)) == [("m_0", "KIND_CPU", 1, [1, 7])]
    assert completed("instance_group { kind: KIND_GPU }", (0, 1)) == [("m_0", "KIND_GPU", 1, [0, 1])]


def test_a_group_of_onnxruntime_has_two_instances_on_the_processor_by_default() -> None:
    assert completed("", (), backend="onnxruntime") == [("m", "KIND_CPU", 2, [])]
    assert completed("instance_group { kind: KIND_CPU }", (0,), backend="onnxruntime") == [("m_0", "KIND_CPU", 2, [])]
    assert completed("instance_group { kind: KIND_CPU count: 1 }", (), backend="onnxruntime")[0][2] == 1
    assert completed("", (0,), backend="onnxruntime") == [("m", "KIND_GPU", 1, [0])]
    assert completed("", (), (InstanceGroupKind.CPU, 1), backend="onnxruntime") == [("m", "KIND_CPU", 1, [])]


@pytest.fixture
def repository(repository: Repository) -> Repository:
    repository.backend("b", INSTANCE_BACKEND)
    return repository


@pytest.mark.parametrize(
    ("gpus", "group", "message"),
    [
        ("", "kind: KIND_GPU", "instance group m_0 of model m has kind KIND_GPU but no GPUs are available"),
        (
            "0,1",
            "kind: KIND_GPU gpus: [1, 2]",
            "instance group m_0 of model m specifies invalid or unsupported gpu id 2. GPUs with at least the minimum "
            "required CUDA compute compatibility of 6.000000 are: 0, 1",
        ),
        (
            "0",
            'name: "g" kind: KIND_CPU gpus: 0',
            "instance group g of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            "0",
            "kind: KIND_MODEL gpus: 0",
            "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
        ),
    ],
)
def test_what_the_host_has_not_is_refused_in_tritons_words(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, gpus: str, group: str, message: str
) -> None:
    monkeypatch.setenv("LLMBACKEND_GPUS", gpus)
    repository.model("m", "b", f"instance_group {{ {group} }}")
    with serving(repository) as server:
        assert message in load_error(server, "m")


def places(server: InferenceServer) -> list[tuple[str, int]]:
    return sorted((instance.name, instance.device_id) for instance in version_of(server, "m").instances)


def test_instances_of_listed_gpus_come_go_and_serve(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBACKEND_GPUS", "0,1,2")
    repository.model("m", "b", "instance_group { kind: KIND_GPU gpus: [0, 2] count: 2 }")
    with serving(repository, "m") as server:
        assert places(server) == [("m_0_0", 0), ("m_0_0", 2), ("m_0_1", 0), ("m_0_1", 2)]
        kept = {id(instance) for instance in version_of(server, "m").instances if instance.name == "m_0_0"}
        repository.model("m", "b", "instance_group { kind: KIND_GPU gpus: [0, 1, 2] }")
        server.load_model("m")
        assert places(server) == [("m_0_0", 0), ("m_0_0", 1), ("m_0_0", 2)]
        assert kept < {id(instance) for instance in version_of(server, "m").instances}
        (response,) = send(server, "m").responses()
        assert response.error is None
        eventually(lambda: not version_of(server, "m").instance_set.removal_count)


def test_visible_devices_are_read_as_cuda_reads_them() -> None:
    gpus = [
        DriverGpu("GPU-aaaa-1", 8.0),
        DriverGpu("GPU-aabb-2", 9.0, ("MIG-11", "MIG-GPU-aabb-2/1/0", "MIG-22", "MIG-GPU-aabb-2/2/0")),
        DriverGpu("GPU-cccc-3", 9.0),
    ]

    def visible(text: str) -> list[int]:
        return [gpus.index(gpu) for gpu in visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": text})]

    assert visible_gpus(gpus, {}) == gpus
    assert visible("2,0") == [2, 0] and visible("GPU-cc, GPU-aabb-2") == [2, 1]
    assert visible("") == visible("-1") == visible("GPU-aa") == visible("MIG-33") == []
    assert visible("1,9,0") == [1] and visible("1,1") == [1]
    assert visible("MIG-22") == visible("MIG-GPU-aabb-2/1/0") == visible("MIG-11,MIG-22") == [1]


class Nvml:
    """The driver's library of a machine with two GPUs. The second one is divided; the first one knows no such thing."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 100 + index
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = handle.value - 92, 6
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: int) -> int:
        uuid.value = f"{'GPU' if handle.value < 200 else 'MIG'}-{handle.value}".encode()
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return 3 if handle.value == 100 else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, instance: Any) -> int:
        instance._obj.value = 200 + index
        return 6 if index % 2 else 0

    def nvmlDeviceGetGpuInstanceId(self, instance: Any, number: Any) -> int:
        number._obj.value = instance.value - 190
        return 0

    def nvmlDeviceGetComputeInstanceId(self, instance: Any, number: Any) -> int:
        return 0 if instance.value < 204 else 1


def test_instances_of_a_divided_gpu_are_found_by_both_their_names() -> None:
    names = "MIG-200", "MIG-GPU-101/10/0", "MIG-202", "MIG-GPU-101/12/0", "MIG-204", "MIG-206"
    assert driver_gpus(cast("ctypes.CDLL", Nvml())) == (DriverGpu("GPU-100", 8.6), DriverGpu("GPU-101", 9.6, names))


def test_a_stand_in_for_the_hosts_gpus_is_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBACKEND_GPUS", "3, 1")
    assert supported_gpus() == (1, 3)
    monkeypatch.setenv("LLMBACKEND_GPUS", "all")
    with pytest.raises(ValueError, match="LLMBACKEND_GPUS is 'all', expected comma-separated GPU ids"):
        supported_gpus()
    monkeypatch.delenv("LLMBACKEND_GPUS")
    assert set(supported_gpus(99.0)) == set()


def test_an_invalid_compute_capability_is_refused_by_name() -> None:
    with pytest.raises(TritonError, match="backend config 'min-compute-capability' is 'x', expected a number"):
        HostGpus.find({"": {"min-compute-capability": "x"}})
