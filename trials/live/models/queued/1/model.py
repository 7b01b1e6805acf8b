import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Waits, and says which request of all this was."""

    def initialize(self, args):
        self.order = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            time.sleep(int(pb_utils.get_input_tensor_by_name(request, "WAIT_MS").as_numpy()[0, 0]) / 1000)
            self.order += 1
            tensor = pb_utils.Tensor("ORDER", np.array([[self.order]], np.int32))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
