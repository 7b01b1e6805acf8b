"""Requests that load or unload a LoRA adapter: from the OpenAI frontend's request parameter to the registry's change.

For: ModelInstanceState. Does not know: HTTP, files, engines. Invariant: only a frontend can send the parameter, which
has checked the role of the API key: clients' parameters never begin with `triton_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from llmbackend.core.backend_api import Request

LORA_CHANGE: Final = "triton_lora_change"
"""JSON of a LoraChange."""


@dataclass(frozen=True, slots=True)
class LoraChange:
    action: Literal["load", "unload"]
    name: str
    folder: str = ""
    """The operator's, below which adapters lie."""
    path: str = ""
    in_place: bool = False
    """Whether it may take the place of a loaded one of this name."""


_decode = msgspec.json.Decoder(LoraChange).decode


def lora_change(request: Request) -> LoraChange | None:
    """None for a request that changes nothing."""
    value = request.parameters.get(LORA_CHANGE)
    return None if value is None else _decode(str(value))
