"""Launches of the sampling kernels for a real vocabulary, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import numpy as np
import torch

from llmbackend.engine.gpu.device_sampler import DeviceSampler
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.token_masks import TokenMasks, all_tokens


def launch_sampling(_capability: int) -> None:
    sampler, ints = DeviceSampler(64, 151936, (2,), "cpu"), torch.zeros(3, dtype=torch.int32)
    everything = SamplingParams(top_p=0.5, logprobs=2, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=2)
    sampler.add_row(0, InferRequest(request_id="r", prompt_token_ids=(1,), sampling=everything))
    masks = TokenMasks(np.zeros(3, np.int32), all_tokens(151936)[np.newaxis])
    prepared = sampler.prepare(masks=masks)
    prepared.complete()
    prepared.sample(torch.zeros(3, 151936, dtype=torch.bfloat16), ints, ints, torch.zeros(64, 512).int(), ints)
