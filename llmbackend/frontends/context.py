"""FrontendContext: what all frontends of one server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmbackend.core.host_protocol import Host
from llmbackend.core.server_log import ServerLog

from .access.access_control import AccessControl
from .access.settings import NO_ACCESS_CONTROL
from .generation.models import ModelCatalog
from .generation.sealed_reasoning import SealingKey, sealing_key
from .inference_gate import InferenceGate
from .journals.response_store import ResponseStore
from .journals.resumable_streams import ResumableStreams
from .limits import FrontendLimits
from .protocol_options import DEFAULT_OPTIONS, ProtocolOptions

DEFAULT_MAX_INPUT_SIZE_BYTES: Final = 64 << 20
DEFAULT_MAX_BODY_BYTES: Final = 4 << 20
"""Enough for the text of a million tokens. Parsing JSON of this size holds the GIL for about 50 ms."""


@dataclass(frozen=True, kw_only=True)
class FrontendContext:
    gate: InferenceGate
    catalog: ModelCatalog
    access: AccessControl
    limits: FrontendLimits
    log: ServerLog
    options: ProtocolOptions
    sealing_key: SealingKey
    store: ResponseStore | None
    """None: nothing is stored."""
    streams: ResumableStreams
    max_input_size_bytes: int
    """Limit for a body outside of /v1, both compressed and decompressed (Triton's --http-max-input-size)."""
    max_body_bytes: int
    """Limit for a body under /v1."""

    @property
    def server(self) -> Host:
        return self.gate.server

    @classmethod
    def of(
        cls,
        server: Host,
        *,
        gate: InferenceGate | None = None,
        access: AccessControl | None = None,
        limits: FrontendLimits | None = None,
        log: ServerLog | None = None,
        options: ProtocolOptions = DEFAULT_OPTIONS,
        store: ResponseStore | None = None,
        streams: ResumableStreams | None = None,
        max_input_size_bytes: int = DEFAULT_MAX_INPUT_SIZE_BYTES,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    ) -> FrontendContext:
        limits = limits or FrontendLimits()
        gate = gate or InferenceGate(server, limits.inference)
        return cls(
            gate=gate,
            catalog=ModelCatalog(gate, options.openai_lora_separator, options.openai_fingerprint),
            access=access or AccessControl(NO_ACCESS_CONTROL),
            limits=limits,
            log=log or ServerLog(),
            options=options,
            sealing_key=sealing_key(options.reasoning_secret),
            store=store,
            streams=streams or ResumableStreams(),
            max_input_size_bytes=max_input_size_bytes,
            max_body_bytes=max_body_bytes,
        )
