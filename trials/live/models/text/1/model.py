import json

import numpy as np
import triton_python_backend_utils as pb_utils


def strings(*texts):
    return np.array([text.encode() for text in texts], dtype=object)


class TritonPythonModel:
    """Upper case, and what came with the text. "fail" fails; "fail CODE" with that code."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        text = values["text_input"][0].decode()
        if text.startswith("fail"):
            code = text.partition(" ")[2] or "INTERNAL"
            error = pb_utils.TritonError("it failed as it was told", getattr(pb_utils.TritonError, code))
            return pb_utils.InferenceResponse(error=error)
        if text == "raise":
            raise ValueError("it raised as it was told")
        about = {
            "parameters": json.loads(request.parameters()),
            "id": request.request_id(),
            "stop": [item.decode() for item in values["stop"]] if "stop" in values else None,
            **{name: values[name].tolist() for name in ("max_tokens", "stream", "temperature") if name in values},
        }
        outputs = [
            pb_utils.Tensor("text_output", strings(text.upper())),
            pb_utils.Tensor("about", strings(json.dumps(about, sort_keys=True))),
        ]
        return pb_utils.InferenceResponse(outputs)
