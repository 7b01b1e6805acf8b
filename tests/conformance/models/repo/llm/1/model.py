# words of text_input are commands: "n=3" number of responses, "err" error after k, "sleep=ms"
import json, os, threading, time, numpy as np
import triton_python_backend_utils as pb_utils

LOG = open(__import__("os").environ.get("MODEL_EVENT_LOG", "/dev/null"), "a", buffering=1)


class TritonPythonModel:
    def initialize(self, args):
        self.threads = []
        self.lock = threading.Lock()
        self.inflight = 0
        LOG.write("initialize %s\n" % json.dumps({k: (v if k != "model_config" else "...") for k, v in args.items()}))

    def execute(self, requests):
        for r in requests:
            t = threading.Thread(target=self.run, args=(r,), daemon=True)
            with self.lock:
                self.inflight += 1
            t.start()
        return None

    def run(self, r):
        snd = r.get_response_sender()
        text = pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy().flatten()[0].decode()
        opt = dict((w.split("=") + ["1"])[:2] for w in text.split())
        n = int(opt.get("n", 3))
        ms = float(opt.get("sleep", 0))
        err = int(opt.get("err", -1))
        F = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            if "preerr" in opt:
                snd.send(
                    pb_utils.InferenceResponse(
                        error=pb_utils.TritonError("early failure", pb_utils.TritonError.INVALID_ARG)
                    ),
                    flags=F,
                )
                return
            if "params" in opt:
                snd.send(
                    pb_utils.InferenceResponse(
                        [
                            pb_utils.Tensor(
                                "text_output",
                                np.array(
                                    [
                                        json.dumps(
                                            {
                                                "params": json.loads(r.parameters()),
                                                "id": r.request_id(),
                                                "stream": (lambda t: None if t is None else t.as_numpy().tolist())(
                                                    pb_utils.get_input_tensor_by_name(r, "stream")
                                                ),
                                                "max_tokens": (lambda t: None if t is None else t.as_numpy().tolist())(
                                                    pb_utils.get_input_tensor_by_name(r, "max_tokens")
                                                ),
                                                "sampling_parameters": (
                                                    lambda t: None if t is None else [x.decode() for x in t.as_numpy()]
                                                )(pb_utils.get_input_tensor_by_name(r, "sampling_parameters")),
                                            }
                                        ).encode()
                                    ],
                                    dtype=object,
                                ),
                            )
                        ]
                    ),
                    flags=F,
                )
                return
            for i in range(n):
                if ms:
                    time.sleep(ms / 1000)
                if r.is_cancelled():
                    LOG.write("cancelled id=%s at %d\n" % (r.request_id(), i))
                    snd.send(
                        pb_utils.InferenceResponse(
                            error=pb_utils.TritonError("Client requested to stop", pb_utils.TritonError.CANCELLED)
                        ),
                        flags=F,
                    )
                    return
                if i == err:
                    e = pb_utils.TritonError(
                        "boom at %d" % i, getattr(pb_utils.TritonError, opt.get("code", "INTERNAL"))
                    )
                    resp = pb_utils.InferenceResponse(error=e)
                    if "cont" in opt:
                        snd.send(resp)
                    else:
                        snd.send(resp, flags=F)
                        return
                    continue
                resp = pb_utils.InferenceResponse(
                    [pb_utils.Tensor("text_output", np.array([(" tok%d" % i).encode()], dtype=object))]
                )
                if "lastfinal" in opt and i == n - 1:
                    snd.send(resp, flags=F)
                    return
                snd.send(resp)
            snd.send(flags=F)
        finally:
            with self.lock:
                self.inflight -= 1
            LOG.write("done id=%s text=%s\n" % (r.request_id(), text))

    def finalize(self):
        LOG.write("finalize begin inflight=%d\n" % self.inflight)
        t = time.time()
        while self.inflight and time.time() - t < 30:
            time.sleep(0.05)
        LOG.write("finalize end inflight=%d\n" % self.inflight)
