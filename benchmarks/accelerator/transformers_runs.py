"""transformers' own continuous batching on the same shape, device and workloads.

    python -m benchmarks.accelerator.transformers_runs --shape llama-3.1-8b --json FILE --scratch FOLDER

For the comparison. Independent of our engine. Invariant: the same requests as engine_runs, greedy, with the best
attention that this machine's packages offer: flash attention where it is installed, else sdpa; its own defaults for
graphs and compilation.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from benchmarks.recording import Recorder, seconds_since_process_start
from benchmarks.workloads import Request

from .engine_runs import workloads
from .engines import SCALE
from .section import Section, run_alone
from .shapes import SHAPES

RESULT_TIMEOUT_S = 60


def measure(section: Section) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    shape = SHAPES[section.shape]
    config = transformers.AutoConfig.from_pretrained(shape.write(section.scratch / section.shape))
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda" if section.device.startswith("cuda") else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
    described = f"transformers {transformers.__version__}, {attention}"
    section.add(measure="start", ready_s=seconds_since_process_start(), description=described)
    every = list(workloads(shape, SCALE.get(section.shape, 1)).items())
    for name, requests in every if section.on_gpu else [("few", every[0][1][:2])]:
        _run(section, model, requests[:8])
        section.add(measure="workload", workload=name, **_run(section, model, requests))


def _run(section: Section, model: Any, requests: list[Request]) -> dict[str, Any]:
    from transformers import GenerationConfig

    recorder = Recorder(requests)
    longest = max(request.output_tokens for request in requests)
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options: dict[str, Any] = {"generation_config": generation, "block": True, "timeout": 5}
    if not section.on_gpu:  # by default it takes most of the machine's memory for keys and values
        from transformers import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    with model.continuous_batching_context_manager(**options) as manager:
        while not manager.is_running():
            time.sleep(0.01)
        recorder.start()
        for index, request in enumerate(requests):
            manager.add_request(
                request.prompt, request_id=str(index), max_new_tokens=request.output_tokens, streaming=True
            )
        _collect(manager, recorder)
        return recorder.stop()


def _collect(manager: Any, recorder: Recorder) -> None:
    unfinished, heard_s = len(recorder.requests), time.monotonic()
    while unfinished:
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running() or time.monotonic() - heard_s > RESULT_TIMEOUT_S:
                raise RuntimeError("the batching manager died or went silent")
            continue
        if output.error:
            raise RuntimeError(output.error)
        heard_s, index = time.monotonic(), int(output.request_id)
        recorder.tokens(index, len(output.generated_tokens) - len(recorder.times_s[index]))
        unfinished -= output.is_finished()


if __name__ == "__main__":
    run_alone("transformers_runs", measure)
