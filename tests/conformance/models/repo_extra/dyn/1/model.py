import numpy as np, triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        n = len(requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("N", np.array([[n]], dtype=np.int32))]) for r in requests]
