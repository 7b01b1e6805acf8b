"""/v1/load_lora_adapter and /v1/unload_lora_adapter: operators change a model's LoRA adapters at run time.

Invariants: the answer is sent after the change is complete; a name has one change at a time, and changes of different
names are independent. Adapters are below one folder that the operator chooses. Source: vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import orjson
from pydantic import ConfigDict, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from llmbackend.core.messages import InferenceRequest

from ..context import FrontendContext
from ..generation.validation import ClosedObject, Expected, Flag, NonEmpty, Only, read
from ..http.errors import JsonObject, OpenAIError
from ..http.request_body import release_body
from ..http.routing import post
from .endpoints import OpenAIEndpoints, json_object

LORA_NAME: Final = "^[!-+\\--~]{1,128}$"
"""Visible ASCII without the comma, which separates names in a model's configuration."""
_MAX_BODY_BYTES: Final = 64 << 10

_Name = Annotated[
    str, StringConstraints(pattern=LORA_NAME), Expected("1 to 128 visible ASCII characters without a comma")
]


class LoadLoraAdapterRequest(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    lora_name: _Name = Field(description="Name of the adapter, also as a model of this API.")
    lora_path: NonEmpty = Field(description="A folder written by PEFT, below --lora-folder.")
    load_inplace: Flag | None = Field(None, description="Replace a loaded adapter of this name.")
    model: str | None = Field(None, description="The adapter's base model. Default: the only model.")
    is_3d_lora_weight: Annotated[Any, Only(False, reason="adapters only change linear layers")] = None


class UnloadLoraAdapterRequest(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    lora_name: _Name
    lora_int_id: Annotated[Any, Only(reason="adapters are identified by their names")] = None


class LoraEndpoints(OpenAIEndpoints):
    def __init__(self, context: FrontendContext) -> None:
        super().__init__(context)
        self._max_body_bytes = _MAX_BODY_BYTES
        self._folder = context.options.openai_lora_folder
        self._changing: set[str] = set()
        """Names of adapters that are being changed."""

    @post("/v1/load_lora_adapter", body=LoadLoraAdapterRequest, response_class=PlainTextResponse)
    async def load(self, http: Request) -> Response:
        """Load a LoRA adapter"""
        fields = read(LoadLoraAdapterRequest, await self._body(http))
        name = fields.lora_name
        with self._change(name):
            model = await self._catalog.named(fields.model)
            await self._catalog.check_adapter_name(name, model)
            change = {"action": "load", "name": name, "folder": self._folder, "path": fields.lora_path}
            await self._send(model, change | {"in_place": bool(fields.load_inplace)})
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @post("/v1/unload_lora_adapter", body=UnloadLoraAdapterRequest, response_class=PlainTextResponse)
    async def unload(self, http: Request) -> Response:
        """Unload a LoRA adapter"""
        name = read(UnloadLoraAdapterRequest, await self._body(http)).lora_name
        with self._change(name):
            model = self._catalog.model_of_adapter(name)
            await self._send(model, {"action": "unload", "name": name})
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    @contextlib.contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """Raises OpenAIError during another change of this name."""
        if name in self._changing:
            text = f"The lora adapter '{name}' is being loaded or unloaded."
            raise OpenAIError(text, param="lora_name", code="invalid_value")
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    async def _body(self, http: Request) -> JsonObject:
        if not self._folder:
            text = "this server does not load LoRA adapters at run time: it was started without --lora-folder"
            raise OpenAIError(text, status=404, code="unknown_url")
        body = json_object(await self.body_of(http))
        release_body(http)
        return body

    async def _send(self, model: str, change: JsonObject) -> None:
        """Waits for the change, even if the client disconnects."""
        self._gate.admit(1)
        request = InferenceRequest(model_name=model, command=orjson.dumps(change).decode())
        inference = self._gate.submit(request)
        try:
            responses = await inference.collect(1)
        finally:
            inference.close()
        if responses and responses[0].error is not None:
            raise OpenAIError.of(responses[0].error)
