"""The counters of several processes as one: those of the scraped process, and files with those of the others.

Invariants: a sum never decreases, also when a process ends; the number of files is limited by that of running
processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class ProcessCounters(Collector):
    def __init__(self, own: CollectorRegistry, folder: Path) -> None:
        """own: the counters of this process. folder: contains those of the other processes"""
        self._own = own
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        of_files: Any = MultiProcessCollector
        with _locked(self._folder, fcntl.LOCK_SH):
            others = {family.name: family for family in of_files(None, str(self._folder)).collect()}
        for family in self._own.collect():
            other = others.get(family.name)
            yield family if other is None else _sum(family, other)


def _sum(*families: Metric) -> Metric:
    first = families[0]
    total = Metric(first.name, first.documentation, first.type)
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in total_samples(families):
        key = sample.name, frozenset(sample.labels.items())
        values[key] = values.get(key, 0.0) + sample.value
    for (name, labels), value in values.items():
        total.add_sample(name, dict(labels), value)
    return total


def total_samples(families: Iterable[Metric]) -> Iterator[Sample]:
    return (sample for family in families for sample in family.samples if sample.name.endswith("_total"))


def add_ended(folder: Path, pid: int) -> None:
    """Moves the counters of an ended process into the file of all ended ones. Raises OSError, or RuntimeError for a
    damaged file."""
    files: Any = MmapedDict
    with _locked(folder, fcntl.LOCK_EX):
        for file in folder.glob(f"*_{pid}.db"):
            if file.name.startswith("counter_"):
                sums = files(str(folder / "counter_ended.db"))
                for key, value, timestamp, _ in files.read_all_values_from_file(str(file)):
                    sums.write_value(key, sums.read_value(key)[0] + value, timestamp)
                sums.close()
            file.unlink()


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Locks the folder: a process that read it while counters are moved would count them twice, or not at all."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
