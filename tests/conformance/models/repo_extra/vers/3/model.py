import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        c.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        c.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        c.set_max_batch_size(0)
        c.set_dynamic_batching() if False else None
        return c

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
            for r in requests
        ]
