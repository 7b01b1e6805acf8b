import numpy as np, triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.f = pb_utils.MetricFamily(
            name="vllm:prompt_tokens_total",
            description="Number of prefill tokens processed.",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.m = self.f.Metric(labels={"model": args["model_name"], "version": args["model_version"]})
        self.h = None
        try:
            self.hf = pb_utils.MetricFamily(
                name="vllm:ttft_seconds", description="ttft", kind=pb_utils.MetricFamily.HISTOGRAM
            )
            self.h = self.hf.Metric(labels={"model": "m"}, buckets=[0.1, 1.0])
        except Exception as e:
            pb_utils.Logger.log_warn("no histogram: %r" % e)

    def execute(self, requests):
        for r in requests:
            self.m.increment(5)
            self.h and self.h.observe(0.3)
            s = r.get_response_sender()
            note = "plain"
            t = [pb_utils.Tensor("text_output", np.array([b"x"], dtype=object))]
            try:
                resp = pb_utils.InferenceResponse(t, parameters='{"k": 1, "s": "v"}')
                note = "params ok"
            except TypeError as e:
                resp = pb_utils.InferenceResponse(t)
                note = "params not supported: %s" % str(e)[:60]
            pb_utils.Logger.log_info("custom execute " + note)
            s.send(resp, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
