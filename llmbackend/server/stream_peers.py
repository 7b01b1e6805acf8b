"""Joins a host's resumable streams with those of the cluster's other hosts.

For: the serve process of a host in a cluster. Does not know: how hosts find each other. Invariant: a stream is made
again by the application that began it, behind access control.
"""

from __future__ import annotations

from functools import partial

from starlette.types import ASGIApp

from llmbackend.frontends.grpc import resumable
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.journals.stream_copies import Peers, StreamCopies
from llmbackend.frontends.journals.stream_remaking import make_again


def copy_streams(streams: ResumableStreams, app: ASGIApp, gate: InferenceGate, peers: Peers) -> None:
    """From now on resumable streams are copied to `peers`, and made again when their clients come back here. app: the
    HTTP application, without access control."""
    makers = {
        resumable.PATH: partial(resumable.make_again, gate, streams),
        "/": partial(make_again, app),
    }
    streams.copies = StreamCopies(peers, makers, streams)
