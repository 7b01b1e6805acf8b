import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy()
            if b"fail" in x.flatten()[0]:
                out.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("model says no")))
                continue
            if b"raise" in x.flatten()[0]:
                raise ValueError("uncaught in execute")
            out.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("text_output", x),
                        pb_utils.Tensor("n", np.array([[len(x.flatten()[0])]], dtype=np.int32).repeat(x.shape[0], 0)),
                    ]
                )
            )
        return out
