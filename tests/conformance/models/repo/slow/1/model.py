import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(6)

    def execute(self, requests):
        out = []
        for r in requests:
            time.sleep(3)
            out.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            )
        return out

    def finalize(self):
        open(__import__("os").environ.get("MODEL_EVENT_LOG", "/dev/null"), "a").write("slow finalize\n")
