import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives every input back, and says what it saw of the request."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        outputs = [pb_utils.Tensor("OUT_" + tensor.name()[3:], tensor.as_numpy()) for tensor in request.inputs()]
        about = {
            "id": request.request_id(),
            "correlation": str(request.correlation_id()),
            "flags": request.flags(),
            "parameters": json.loads(request.parameters()),
            "requested": sorted(request.requested_output_names()),
            "timeout": request.timeout(),
            "inputs": sorted(tensor.name() for tensor in request.inputs()),
        }
        text = json.dumps(about, sort_keys=True).encode()
        return pb_utils.InferenceResponse([*outputs, pb_utils.Tensor("ABOUT", np.array([text], dtype=object))])
