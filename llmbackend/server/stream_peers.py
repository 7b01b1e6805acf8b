"""Joins a host's resumable streams with those of the cluster's other hosts.

For: the serve process of a host in a cluster. Does not know: how hosts find each other. Invariant: a stream is made
again by the application that began it, behind access control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.types import ASGIApp

from llmbackend.frontends.grpc import resumable
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.resumable_http import make_again
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.journals.stream_copies import Peers, StreamCopies

STREAMS_COPIED: Final = "llmbackend:resumable_streams_copied"


def copy_streams(
    streams: ResumableStreams, app: ASGIApp, gate: InferenceGate, peers: Peers, registry: CollectorRegistry
) -> None:
    """From now on resumable streams are copied to `peers`, and made again when their clients come back here. app: the
    HTTP application, without access control."""
    makers = {
        resumable.PATH: partial(resumable.make_again, gate, streams),
        "/": partial(make_again, app),
    }
    copies = streams.copies = StreamCopies(peers, makers, streams)
    registry.register(CopiesMetric(lambda: copies.are_made))


class CopiesMetric:
    """A collector: whether a host's streams outlive it."""

    def __init__(self, are_made: Callable[[], bool]) -> None:
        self._are_made = are_made

    def collect(self) -> Iterator[Metric]:
        metric = Metric(STREAMS_COPIED, "1: another host has a copy of each resumable stream; 0: none has.", "gauge")
        metric.add_sample(STREAMS_COPIED, {}, float(self._are_made()))
        yield metric
