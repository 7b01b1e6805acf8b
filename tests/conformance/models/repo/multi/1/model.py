import json, numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            s = pb_utils.get_input_tensor_by_name(r, "S").as_numpy()
            i = pb_utils.get_input_tensor_by_name(r, "I").as_numpy()
            b = pb_utils.get_input_tensor_by_name(r, "B")
            info = json.dumps(
                {
                    "params": json.loads(r.parameters()),
                    "id": r.request_id(),
                    "requested": sorted(r.requested_output_names()),
                    "B": None if b is None else b.as_numpy().tolist(),
                    "corr": str(r.correlation_id()),
                    "timeout": r.timeout(),
                    "flags": r.flags(),
                }
            )
            out.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("S", s),
                        pb_utils.Tensor("I", i),
                        pb_utils.Tensor("PARAMS", np.array([info.encode()], dtype=object)),
                    ]
                )
            )
        return out
