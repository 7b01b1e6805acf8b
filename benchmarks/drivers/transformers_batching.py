"""transformers' own continuous batching."""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.recording import Recorder, drive

PAGE_SIZE, MAX_BATCH_TOKENS, MAX_REQUESTS, SPARE_BLOCKS = 64, 512, 64, 64


class Transformers:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import transformers

        torch.set_num_threads(arguments.threads)
        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
        ).eval()
        self.description = f"transformers {transformers.__version__}, torch {torch.__version__}, {arguments.dtype}"

    def run(self, recorder: Recorder) -> dict[str, Any]:
        with self._manager(recorder) as manager:
            while not manager.is_running():
                time.sleep(0.01)
            recorder.start()
            for index, request in enumerate(recorder.requests):
                manager.add_request(
                    request.prompt, request_id=str(index), max_new_tokens=request.output_tokens, streaming=True
                )
            self._collect(manager, recorder)
            return recorder.stop()

    def _manager(self, recorder: Recorder) -> Any:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        blocks = sum(-(-(len(request.prompt) + request.output_tokens) // PAGE_SIZE) for request in recorder.requests)
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=blocks + SPARE_BLOCKS,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=MAX_REQUESTS,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            default_compile_level=0,
        )
        generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5, warmup=False
        )

    @staticmethod
    def _collect(manager: Any, recorder: Recorder) -> None:
        unfinished = len(recorder.requests)
        while unfinished:
            output = manager.get_result(timeout=1)
            if output is None:
                if not manager.is_running():
                    raise RuntimeError("the batching manager died")
                continue
            if output.error:
                raise RuntimeError(output.error)
            index = int(output.request_id)
            recorder.tokens(index, len(output.generated_tokens) - len(recorder.times_s[index]))
            unfinished -= output.is_finished()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    drive(Transformers, parser)
