import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Adds up X along a sequence."""

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        start, end, ready, sequence, x = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0])
            for name in ("START", "END", "READY", "CORRID", "X")
        )
        self.sums[sequence] = x if start else self.sums[sequence] + x
        outputs = [
            pb_utils.Tensor("SUM", np.array([[self.sums[sequence]]], np.int32)),
            pb_utils.Tensor("CONTROL", np.array([[start, end, ready, sequence]], np.int32)),
        ]
        return pb_utils.InferenceResponse(outputs)
