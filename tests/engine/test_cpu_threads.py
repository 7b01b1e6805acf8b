"""How many threads an engine has: by affinity, by limits of cgroups, and with one CPU left to the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmbackend.engine import cpu_threads
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu_threads import cgroup_limits_cpus, engine_threads, usable_cpus

VERSION_2 = {"cpu.max": "150000 100000\n"}
VERSION_1 = {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "folder", "files", "limits"),
    [
        ("0::/pod/container", "pod/container", VERSION_2, [1.5]),
        ("0::/pod/container", "pod", VERSION_2, [1.5]),
        ("0::/", ".", VERSION_2, [1.5]),
        ("0::/../elsewhere", ".", VERSION_2, [1.5]),
        ("0::/pod", "pod", {"cpu.max": "max 100000\n"}, []),
        ("4:cpu:/pod\n0::/", "cpu/pod", VERSION_1, [1.5]),
        ("4:cpu,cpuacct:/docker/1234", "cpu,cpuacct", VERSION_1, [1.5]),
        ("4:cpu:/pod", "cpu/pod", {**VERSION_1, "cpu.cfs_quota_us": "-1\n"}, []),
        ("4:cpuset:/pod", "cpuset/pod", VERSION_1, []),
        ("0::/pod", "pod", {}, []),
    ],
)
def test_limits_of_cgroups(tmp_path: Path, own: str, folder: str, files: dict[str, str], limits: list[float]) -> None:
    own_cgroups, mount = tmp_path / "cgroup", tmp_path / "mount"
    own_cgroups.write_text(own + "\n")
    (mount / folder).mkdir(parents=True)
    for name, text in files.items():
        (mount / folder / name).write_text(text)
    assert list(cgroup_limits_cpus(own_cgroups, mount)) == limits


def test_no_cgroups_no_limits(tmp_path: Path) -> None:
    assert list(cgroup_limits_cpus(tmp_path / "missing", tmp_path)) == []


@pytest.mark.parametrize(("limits", "cpus"), [([], 16), ([64.0], 16), ([8.0, 2.9], 2), ([0.5], 1)])
def test_a_limit_of_time_counts_like_a_smaller_machine(
    monkeypatch: pytest.MonkeyPatch, limits: list[float], cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cpu_threads, "cgroup_limits_cpus", lambda: iter(limits))
    assert usable_cpus() == cpus


@pytest.mark.parametrize(("cpus", "given", "threads"), [(1, 0, 1), (7, 0, 7), (8, 0, 7), (64, 0, 63), (8, 8, 8)])
def test_where_there_are_many_one_is_left_to_the_host(
    monkeypatch: pytest.MonkeyPatch, cpus: int, given: int, threads: int
) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cpus", lambda: cpus)
    assert engine_threads(EngineConfig(model="m", num_threads=given)) == threads
