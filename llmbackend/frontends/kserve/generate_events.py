"""The events of generate_stream: one for each response of a model.

For: the endpoint. Does not know: HTTP, LLMs. Invariants: events have the order of the responses; the JSON of much data
is made apart from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from llmbackend.core.messages import InferenceResponse
from llmbackend.core.outputs import OutputLayout, Outputs

from ..http.errors import error_body
from ..inference import Inference
from ..inference_gate import InferenceGate, are_large
from ..journals.stream_record import Recording
from .generate_codec import encode_response, fields_of_response


class TextEvents:
    """Events of responses whose outputs are one string each. What is the same in all events of a stream is made
    once."""

    def __init__(self, response: InferenceResponse, layout: OutputLayout) -> None:
        """response: any one with this layout."""
        self.layout = layout
        fixed = fields_of_response(response)
        indices = {name: index for index, name in enumerate(layout.names)}
        pieces, self._order = [b"data: {"], []
        for name in sorted({*fixed, *indices}):
            pieces[-1] += orjson.dumps(name) + b":"
            if name in indices:
                self._order.append(indices[name])
                pieces.append(b",")
            else:
                pieces[-1] += orjson.dumps(fixed[name]) + b","
        self._pieces = [*pieces[:-1], pieces[-1].removesuffix(b",") + b"}\n\n"]

    def event(self, values: Sequence[str]) -> bytes:
        parts = [self._pieces[0]]
        for index, piece in zip(self._order, self._pieces[1:], strict=True):
            parts += (orjson.dumps(values[index]), piece)
        return b"".join(parts)


def json_of_response(response: InferenceResponse) -> bytes:
    return error_body(response.error.message) if response.error is not None else encode_response(response)


class ResponseEvents:
    """An EventSource of one inference."""

    quiet_s: float | None = None

    def __init__(
        self,
        gate: InferenceGate,
        inference: Inference,
        first: InferenceResponse | None,
        recording: Recording | None = None,
    ) -> None:
        """first: the one that was popped already; None: the model sends none. recording: of the stream that is made of
        it."""
        self._recording = recording
        if recording is not None and first is not None:
            recording.delta(0, first.delta)
        self._gate = gate
        self._inference = inference
        self._held = first
        """Popped, and not written yet."""
        self._error: Exception | None = None
        self._texts: TextEvents | None = None
        """Of the layout that the latest response had."""
        self.is_over = False
        self.needs_task = True

    def listen(self, listener: Callable[[], None]) -> None:
        self._inference.listener = lambda inferences: listener()

    def ready(self) -> bytes:
        if self.needs_task or self.is_over:
            return b""
        inference = self._inference
        parts: list[bytes] = []
        try:
            while inference.has_responses:
                response = inference.pop()[0]
                if response is None:
                    continue
                if self._recording is not None:
                    self._recording.delta(0, response.delta)
                if are_large(response.outputs):
                    self._held, self.needs_task = response, True
                    return b"".join(parts)
                parts.append(self._event(response))
            self.is_over = inference.is_over
        except Exception as error:
            self._error, self.needs_task = error, True
        return b"".join(parts)

    async def awaited(self) -> bytes:
        """Raises what making JSON raised."""
        self.needs_task = False
        if self._error is not None:
            raise self._error
        held, self._held = self._held, None
        if held is None:
            self.is_over = self._inference.is_over
            return b""
        json = await self._gate.encode(held.outputs, json_of_response, held)
        self.is_over = self._inference.is_over
        return b"data: %b\n\n" % json

    def _event(self, response: InferenceResponse) -> bytes:
        outputs = response.outputs
        if type(outputs) is not Outputs or not outputs.layout.is_text or response.parameters:
            return b"data: %b\n\n" % json_of_response(response)
        texts = self._texts
        if texts is None or texts.layout is not outputs.layout:
            texts = self._texts = TextEvents(response, outputs.layout)
        try:
            return texts.event(outputs.values)
        except TypeError:  # bytes, which may be no text
            return b"data: %b\n\n" % json_of_response(response)

    def ping(self) -> bytes:
        return b""
