"""Launches of the sampling kernels in the shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.device_sampler import DeviceSampler
from llmbackend.engine.infer_request import InferRequest, SamplingParams

PARAMETERS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=40, logprobs=5, repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=2),
)


def launch_sampling(_capability: int) -> None:
    sampler = DeviceSampler(4, 151936, (2,), "cpu")
    ints, table = torch.arange(3, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32)
    logits = torch.zeros(3, 151936, dtype=torch.bfloat16)
    for row, parameters in enumerate(PARAMETERS):
        sampler.add_row(row, InferRequest(request_id="r", prompt_token_ids=(1,), sampling=parameters))
        sampler.sample(logits, ints, ints, table, table[:, 0])
