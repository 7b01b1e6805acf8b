"""Models in the style of the examples of Triton's python backend: the same calls of pb_utils, in our own words."""

from __future__ import annotations

HEAD = "import asyncio, json, threading, time\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"

PAIR_CONFIG = """
name: "@"
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
BLS_CONFIG = PAIR_CONFIG.replace(
    "input [", 'input [ { name: "MODEL_NAME" data_type: TYPE_STRING dims: [ 1 ] optional: true },'
)

ADD_SUB = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        entries = [pb_utils.get_output_config_by_name(config, name) for name in ("OUTPUT0", "OUTPUT1")]
        self.types = [pb_utils.triton_string_to_numpy(entry["data_type"]) for entry in entries]

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            sums = pb_utils.Tensor("OUTPUT0", (a + b).astype(self.types[0]))
            differences = pb_utils.Tensor("OUTPUT1", (a - b).astype(self.types[1]))
            responses.append(pb_utils.InferenceResponse(output_tensors=[sums, differences]))
        return responses

    def finalize(self):
        print("Cleaning up...")
"""
)
BLS_SYNC = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
            inner = pb_utils.InferenceRequest(
                model_name=name,
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=[pb_utils.get_input_tensor_by_name(request, n) for n in ("INPUT0", "INPUT1")],
            )
            answer = inner.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            responses.append(pb_utils.InferenceResponse(output_tensors=answer.output_tensors()))
        return responses
"""
)
BLS_ASYNC = (
    HEAD
    + """
class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [pb_utils.get_input_tensor_by_name(request, n) for n in ("INPUT0", "INPUT1")]
            awaits = [
                pb_utils.InferenceRequest(
                    model_name="add_sub", requested_output_names=[output], inputs=inputs
                ).async_exec()
                for output in ("OUTPUT0", "OUTPUT1")
            ]
            answers = await asyncio.gather(*awaits)
            for answer in answers:
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
            outputs = [pb_utils.get_output_tensor_by_name(a, f"OUTPUT{i}") for i, a in enumerate(answers)]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
"""
)

SQUARE_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
SQUARE = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        if not pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"])):
            raise pb_utils.TritonModelException(f"{args['model_name']} must be decoupled")
        self.threads, self.lock = 0, threading.Lock()

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(
                target=self.respond,
                args=(request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()),
            )
            thread.daemon = True
            with self.lock:
                self.threads += 1
            thread.start()
        return None

    def respond(self, sender, count):
        for _ in range(count[0]):
            sender.send(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", count)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.lock:
            self.threads -= 1

    def finalize(self):
        while self.threads:
            time.sleep(0.01)
"""
)
BLS_DECOUPLED_SYNC = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="square", requested_output_names=["OUT"], inputs=request.inputs()
            )
            total = np.zeros(1, np.int32)
            for answer in inner.exec(decoupled=True):
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
                if len(answer.output_tensors()) > 0:
                    total += pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", total)]))
        return responses
"""
)
BLS_DECOUPLED_ASYNC = (
    HEAD
    + """
class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            awaits = [
                pb_utils.InferenceRequest(
                    model_name="square", requested_output_names=["OUT"], inputs=request.inputs()
                ).async_exec(decoupled=True)
                for _ in range(2)
            ]
            totals = []
            for stream in await asyncio.gather(*awaits):
                total = np.zeros(1, np.int32)
                for answer in stream:
                    if len(answer.output_tensors()) > 0:
                        total += pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
                totals.append(total)
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", sum(totals))]))
        return responses
"""
)

AUTO_COMPLETE = ADD_SUB.replace(
    "class TritonPythonModel:",
    """class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        known = [entry["name"] for kind in ("input", "output") for entry in config[kind]]
        for i in range(2):
            entry = {"data_type": "TYPE_FP32", "dims": [4]}
            if f"INPUT{i}" not in known:
                auto_complete_model_config.add_input({"name": f"INPUT{i}", **entry})
            if f"OUTPUT{i}" not in known:
                auto_complete_model_config.add_output({"name": f"OUTPUT{i}", **entry})
        auto_complete_model_config.set_max_batch_size(MAX_BATCH_SIZE)
        BATCHING
        return auto_complete_model_config
""",
)
CUSTOM_METRICS = ADD_SUB.replace(
    "    def execute(self, requests):\n",
    """        self.family = pb_utils.MetricFamily(
            name="requests_process_latency_ns", description="Cumulative time spent", kind=pb_utils.MetricFamily.COUNTER
        )
        self.metric = self.family.Metric(labels={"model": "custom_metrics", "version": "1"})

    def execute(self, requests):
        start_ns = time.time_ns()
        responses = self.answers(requests)
        self.metric.increment(time.time_ns() - start_ns)
        pb_utils.Logger.log_info("Cumulative requests processing latency: {}".format(self.metric.value()))
        return responses

    def answers(self, requests):
""",
)
INSTANCE_KIND = ADD_SUB.replace(
    "        config = json",
    """        self.device = args["model_instance_kind"].lower(), int(args["model_instance_device_id"])
        assert self.device == ("cpu", 0), self.device
        config = json""",
)
PREPROCESSING_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "INPUT_0" data_type: TYPE_UINT8 dims: [ -1 ] } ]
output [ { name: "OUTPUT_0" data_type: TYPE_FP32 dims: [ 3, 2, 2 ] } ]

instance_group [ { kind: KIND_CPU rate_limiter { resources [ { name: "R1" count: 1 } ] priority: 1 } } ]
"""
PREPROCESSING = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        entry = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "OUTPUT_0")
        self.dtype = pb_utils.triton_string_to_numpy(entry["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "INPUT_0").as_numpy()
            pixels = image.reshape(-1, 2, 2, 3).transpose(0, 3, 1, 2) / 255
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT_0", pixels.astype(self.dtype))]))
        return responses
"""
)
