"""What one model version does with its responses before they leave it: reshape, classification, time to the first.

For: LoadedModel. Does not know: requests, backends. Invariant: a request that asks for nothing of this keeps its own
callback, and pays nothing. Source: InferenceResponse in Triton's core.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.messages import InferenceRequest
from llmbackend.core.metrics.latencies import FirstResponse, Histogram

from .classification import classifying, read_labels
from .delivery import Delivery
from .reshape import output_reshapes, reshaping


class Responses:
    def __init__(self, config: ModelConfig, directory: Path, first_response: Histogram | None) -> None:
        """Raises TritonError for a label file that can not be read."""
        self._labels = read_labels(config, directory)
        self._reshapes = output_reshapes(config)
        self._batches = config.max_batch_size > 0
        self._first_response = first_response

    def around(self, message: InferenceRequest) -> InferenceRequest:
        """`message` with a callback to which the model's responses can be given as the backend makes them."""
        callback = message.response_callback
        if message.classes:
            callback = Delivery(callback, classifying(message.classes, self._labels, self._batches))
        if self._reshapes:
            callback = Delivery(callback, reshaping(self._reshapes))
        if self._first_response is not None:
            callback = FirstResponse(callback, self._first_response)
        return message if callback is message.response_callback else replace(message, response_callback=callback)
