"""Hypothesis strategies for engine requests: small ones that often reach every limit of a small engine."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from llmbackend.engine.messages import InferRequest, SamplingParams
from tests.helpers.mock_oracle import mock_generate

VOCAB_SIZE = 259

sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from((0, 1, 5, 12, 24)),
    min_tokens=st.sampled_from((0, 0, 3)),
    prompt_logprobs=st.sampled_from((None, None, None, 0, 2)),
    temperature=st.sampled_from((0.0, 0.9)),
    top_k=st.sampled_from((0, 4)),
    top_p=st.sampled_from((1.0, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.2)),
    frequency_penalty=st.sampled_from((0.0, 0.5)),
    seed=st.integers(0, 7),
    stop_token_ids=st.sampled_from(((), tuple(range(40, 60)))),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, None, 0, 2)),
)
_tokens = st.lists(st.integers(0, 255), min_size=1, max_size=20).map(tuple)
_alike = st.builds(
    lambda length, own: (*range(65, 65 + length), *own), st.integers(1, 16), st.sampled_from(((), (7,), (8, 9)))
)
prompts = _tokens | _alike
"""Half of them begin as others do, so that the prefix cache has something to find."""
salts = st.sampled_from(("", "", "", "salt"))
priorities = st.integers(-1, 1)
shares = st.sampled_from((0.0, 0.0, 0.0, 0.1, 0.5, 1.0))
"""How much of a request's output another engine has made before."""


def resumed(request: InferRequest, share: float, max_model_len: int) -> InferRequest:
    """The request as it is given to a second engine, after `share` of its tokens came out of a first one."""
    output = mock_generate(request, max_model_len=max_model_len).token_ids
    return msgspec.structs.replace(request, output_token_ids=output[: round(len(output) * share)])
