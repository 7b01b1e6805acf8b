"""Counters that frontend processes keep besides the host's own, summed where the host shows them.

For: AccessMetrics of a host with frontend processes. Does not know: what is counted. Invariant: what a process has
counted stays in the sum when it ends. (In those processes prometheus_client keeps counters in files, of which this one
reads the folder: its multiprocess mode.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector


class ProcessCounters(Collector):
    def __init__(self, own: CollectorRegistry, folder: Path) -> None:
        """own: the counters of this process. folder: where the others have theirs."""
        self._own = own
        self._folder = str(folder)

    def collect(self) -> Iterator[Metric]:
        of_files: Any = MultiProcessCollector
        others = {family.name: family for family in of_files(None, self._folder).collect()}
        for family in self._own.collect():
            other = others.get(family.name)
            yield family if other is None else _sum(family, other)


def _sum(*families: Metric) -> Metric:
    first = families[0]
    total = Metric(first.name, first.documentation, first.type)
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in _counted(families):
        key = sample.name, frozenset(sample.labels.items())
        values[key] = values.get(key, 0.0) + sample.value
    for (name, labels), value in values.items():
        total.add_sample(name, dict(labels), value)
    return total


def _counted(families: Iterable[Metric]) -> Iterator[Any]:
    return (sample for family in families for sample in family.samples if sample.name.endswith("_total"))
