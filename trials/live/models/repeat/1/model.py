import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """COUNT responses. Words of the text: early, late (an error before or after them), joined (FINAL comes with the
    last one), slow (20 ms each), until (goes on until it is cancelled, and says so)."""

    def initialize(self, args):
        self.cancelled = 0

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request, request.get_response_sender())).start()

    def answer(self, request, sender):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
        count = pb_utils.get_input_tensor_by_name(request, "COUNT")
        words = text.split()
        if "cancelled?" in words:
            self.send(sender, str(self.cancelled), 0, FINAL)
            return
        if "early" in words:
            self.fail(sender, "an early error")
            return
        number = 3 if count is None else int(count.as_numpy()[0])
        index = 0
        while index < number or "until" in words:
            if request.is_cancelled():
                self.cancelled += 1
                sender.send(flags=FINAL)
                return
            joined = "joined" in words and index == number - 1
            self.send(sender, f"{text} {index}", index, FINAL if joined else 0)
            if joined:
                return
            if "slow" in words or "until" in words:
                time.sleep(0.02)
            index += 1
        if "late" in words:
            self.fail(sender, "a late error")
            return
        sender.send(flags=FINAL)

    def send(self, sender, text, index, flags):
        outputs = [
            pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object)),
            pb_utils.Tensor("INDEX", np.array([index], np.int32)),
        ]
        sender.send(pb_utils.InferenceResponse(outputs), flags=flags)

    def fail(self, sender, text):
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)), flags=FINAL)
