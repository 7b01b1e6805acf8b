"""The flags of `llmbackend serve` for stored responses, and for streams that clients come back to.

For: the command line. Does not know: what is done with them. Invariant: a value that cannot be ends with a message that
names its flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from llmbackend.frontends.journals.store_settings import IN_MEMORY, IdempotencyLimits, StoreSettings

from .flag_groups import bad_option


@dataclass(frozen=True)
class StoreFlags:
    PANEL: ClassVar = "Stored responses"

    response_store: Annotated[str, typer.Option(help=f"Where responses are kept: {StoreSettings.FORMS}.")] = (
        IN_MEMORY.url
    )
    response_ttl: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds that a response is kept. Default: an hour in memory, 30 days elsewhere."),
    ] = None
    response_store_max_bytes: Annotated[
        int, typer.Option(min=1 << 20, help="What all responses may hold; beyond it the oldest go.")
    ] = IN_MEMORY.max_bytes
    response_store_max_per_key: Annotated[
        int, typer.Option(min=1, help="Responses of one API key, or of all clients without keys; the oldest go.")
    ] = IN_MEMORY.max_responses_per_key
    resume_grace: Annotated[
        float, typer.Option(min=0, help="Seconds that a resumable stream goes on without a client.")
    ] = IN_MEMORY.resume_grace_s
    idempotency_ttl: Annotated[
        float,
        typer.Option(min=0, help="Seconds that the answer to a request with an Idempotency-Key is kept; 0 = never."),
    ] = IN_MEMORY.idempotency.ttl_s

    def settings(self) -> StoreSettings:
        try:
            return StoreSettings(
                url=self.response_store,
                ttl_s=self.response_ttl,
                max_bytes=self.response_store_max_bytes,
                max_responses_per_key=self.response_store_max_per_key,
                resume_grace_s=self.resume_grace,
                idempotency=IdempotencyLimits(ttl_s=self.idempotency_ttl),
            )
        except ValueError as error:
            raise bad_option("--response-store", str(error)) from None
