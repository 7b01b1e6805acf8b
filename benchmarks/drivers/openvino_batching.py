"""OpenVINO GenAI's ContinuousBatchingPipeline, tokens timed at each `step()`."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from benchmarks.recording import Recorder, drive


class OpenVino:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": arguments.threads}
        if arguments.precision:
            properties["INFERENCE_PRECISION_HINT"] = arguments.precision
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self._ids = itertools.count()
        self.description = f"openvino {openvino.__version__}, {arguments.precision or 'default'} execution"

    def run(self, recorder: Recorder) -> dict[str, Any]:
        recorder.start()
        handles = {0: self._add(recorder, 0)}
        if len(recorder.requests) > 1 and recorder.requests[0].prompt[0] == recorder.requests[1].prompt[0]:
            # A prefix is only found after it was computed: the first request runs first, within the measured time.
            while not handles[0].can_read():
                self._pipeline.step()
        handles |= {index: self._add(recorder, index) for index in range(1, len(recorder.requests))}
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        recorder.tokens(index, len(output.generated_ids))
        return recorder.stop()

    def _add(self, recorder: Recorder, index: int) -> Any:
        import numpy as np
        import openvino
        import openvino_genai

        request = recorder.requests[index]
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = request.output_tokens
        generation.ignore_eos = True
        generation.do_sample = False
        generation.apply_chat_template = False
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._ids), prompt, generation)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="", help="bf16, f32 or f16; default: OpenVINO's own choice")
    parser.add_argument("--threads", type=int, default=2)
    drive(OpenVino, parser)
