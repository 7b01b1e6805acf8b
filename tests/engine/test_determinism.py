"""The first law, on CPU bit by bit: a request's tokens and logprobs depend on nothing but the request.

Not on its neighbours, the chunks of its prompt, preemption, cached prefixes, speculation, the number of threads, or an
engine that died and was replaced. In float32, bfloat16 and int8, where a difference of one rounding would show in
near-ties; for the native program, for modules on native kernels, and for plain torch.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf
from llguidance import LLMatcher

from llmbackend.engine.config import EngineConfig, SpeculativeConfig, StructuredOutputsConfig
from llmbackend.engine.cpu.native_runner import NativeRunner, why_modules
from llmbackend.engine.cpu.packed_decoder import PackedModel
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import EngineStats, InferRequest, SamplingParams, TokenLogprobs, Vocabulary
from llmbackend.engine.model.module_runner import make_model_runner, pack_or_run
from llmbackend.engine.step import Runner
from tests.helpers.mock_engine import run_counted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

Story = tuple[TokenLogprobs, ...]
OUTPUT_TOKENS = 16
SPECULATION = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1, max_step_tokens=64)

KINDS: dict[str, dict[str, Any]] = {
    "program float32": {"dtype": "float32"},
    "program bfloat16": {"dtype": "bfloat16"},
    "program int8": {"dtype": "bfloat16", "quantization": "int8"},
    "program int4": {"dtype": "bfloat16", "quantization": "int4"},
    "modules float32": {"dtype": "float32", "enforce_eager": True},
    "modules bfloat16": {"dtype": "bfloat16", "enforce_eager": True},
    "torch float32": {"dtype": "float32", "kernels": "torch"},
    "torch bfloat16": {"dtype": "bfloat16", "kernels": "torch"},
}
"""How a step is computed. Results differ between these, and must not differ within one."""
SLOW_KINDS = ("modules", "torch")

CONDITIONS: dict[str, dict[str, Any]] = {
    "speculation, small chunks, preemption": {
        "speculative_config": SPECULATION, "max_num_batched_tokens": 17, "num_kv_blocks": 9,
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "one token of a prompt at a time": {"max_num_batched_tokens": 1},
    "large chunks": {"max_num_batched_tokens": 4096},
    "few rows": {"max_num_seqs": 3},
    "steps of a target time": {"step_target_ms": 1.0},
    "preemption": {"num_kv_blocks": 9, "max_num_batched_tokens": 40},
    "speculation": {"speculative_config": SPECULATION},
    "larger blocks": {"block_size": 64},
    "two threads": {"num_threads": 2},
    "three threads": {"num_threads": 3, "max_num_batched_tokens": 50},
}  # fmt: skip
WORDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nucleus": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "plain": {"temperature": 1.0, "seed": 8},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence": {"temperature": 0.7, "seed": 9, "top_k": 20, "presence_penalty": 0.4, "logprob_token_ids": (7, 511)},
    "minimum": {"temperature": 0.8, "seed": 10, "min_p": 0.02, "frequency_penalty": 0.2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    tf.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        eos_token_id=511,
        initializer_range=0.1,
    ).save_pretrained(path)
    return path


def requests() -> list[InferRequest]:
    """Some with a common beginning, some that repeat themselves, so that there is something to find again."""
    generator = torch.Generator().manual_seed(2)
    common = torch.randint(0, 512, (64,), generator=generator).tolist()
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in (45, 3, 17, 1, 70, 32, 33)]
    prompts += [common + prompts[2], common + prompts[1], common, prompts[1] * 12, prompts[2] * 3]
    words = list(WORDS.values())
    return [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2, **words[i % len(words)]),
        )
        for i, prompt in enumerate(prompts)
    ]


def run(
    model: Path,
    wanted: list[InferRequest],
    of_prompt: bool = False,
    vocabulary: Vocabulary | None = None,
    **options: Any,
) -> tuple[dict[str, Story], EngineStats]:
    """Each request's tokens with their logprobs, or those of its prompt, and the engine's counters at the end."""
    settings = {"num_threads": 1, "block_size": 32, "step_target_ms": 0, **options}
    config = EngineConfig(model=str(model), load_format="dummy", transport="inline", **settings)
    core = EngineCore(config, _runner(config))
    if vocabulary is not None:
        core.set_vocabulary(vocabulary)
    outcomes, stats = run_counted(core, wanted)
    core.close()
    assert not {outcome.error for outcome in outcomes.of.values()} - {None, ""}
    stories = {name: one.prompt_logprobs if of_prompt else one.logprobs for name, one in outcomes.of.items()}
    return stories, stats


def _runner(config: EngineConfig) -> Runner:
    """A program is packed once, as by a fork server whose engines share it: packing takes longer than the requests."""
    if why_modules(config):
        return make_model_runner(config)
    packed = _packed(config.model, config.dtype, config.quantization, config.enable_lora)
    return make_model_runner(config) if packed is None else NativeRunner(config, packed)


@functools.lru_cache(maxsize=2)
def _packed(model: str, dtype: Any, quantization: Any, enable_lora: bool) -> PackedModel | None:
    """None: it has no program."""
    made = pack_or_run(
        EngineConfig(
            model=model, load_format="dummy", transport="inline", num_threads=1, dtype=dtype, quantization=quantization,
            enable_lora=enable_lora,
        )
    )  # fmt: skip
    if isinstance(made, PackedModel):
        return made
    made.close()
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_same_request_same_tokens(kind: str, model: Path) -> None:
    how = KINDS[kind]
    together, stats = run(model, requests(), **how)
    assert all(len(story) == OUTPUT_TOKENS for story in together.values())
    assert stats.prefix_cache_hits > 0
    slow = kind.startswith(SLOW_KINDS)
    for request in requests()[:: 3 if slow else 1]:
        alone, _ = run(model, [request], max_num_seqs=1, **how)
        assert alone[request.request_id] == together[request.request_id]
    for name, condition in list(CONDITIONS.items())[: 2 if slow else None]:
        story, stats = run(model, requests(), **how, **condition)
        assert story == together, name
        assert (stats.num_preemptions > 0) == ("num_kv_blocks" in condition)
        assert (stats.num_draft_tokens > 0) == ("speculative_config" in condition)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("modules bfloat16", "torch bfloat16")])
def test_same_prompt_same_logprobs(kind: str, model: Path) -> None:
    def wanted() -> list[InferRequest]:
        return [
            msgspec.structs.replace(
                request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=i % 3, max_tokens=i % 3 * 8)
            )
            for i, request in enumerate(requests()[::2])
        ]

    def run_prompts(of: list[InferRequest], **options: Any) -> tuple[dict[str, Story], EngineStats]:
        return run(model, of, of_prompt=True, **options)

    how = KINDS[kind]
    together, _ = run_prompts(wanted(), **how)
    for request in wanted():
        assert len(together[request.request_id]) == len(request.prompt_token_ids) - 1
    for request in wanted()[::3]:
        alone, _ = run_prompts([request], max_num_seqs=1, **how)
        assert alone[request.request_id] == together[request.request_id]
    for name in ("one token of a prompt at a time", "three threads"):
        assert run_prompts(wanted(), **how, **CONDITIONS[name])[0] == together, name


@pytest.mark.parametrize("kind", ["program bfloat16", "modules float32"])
def test_a_resumed_request_goes_on_as_it_began(kind: str, model: Path) -> None:
    how = KINDS[kind]
    whole, _ = run(model, requests(), **how)
    for cut in (1, OUTPUT_TOKENS // 2, OUTPUT_TOKENS - 1):
        tokens = {name: tuple(token.token_id for token in story[:cut]) for name, story in whole.items()}
        resumed = [
            msgspec.structs.replace(request, output_token_ids=tokens[request.request_id]) for request in requests()
        ]
        rest, _ = run(model, resumed, max_num_batched_tokens=30, **how)
        assert rest == {name: story[cut:] for name, story in whole.items()}


@pytest.mark.parametrize("kind", ["program bfloat16", "program int8"])
def test_many_forced_tokens_change_nothing(kind: str, model: Path) -> None:
    """More than a step has room for, of one row and of several."""
    vocabulary = Vocabulary(token_bytes=tuple(bytes((i,)) if i < 256 else b"" for i in range(512)))
    forced = '"' + "a long name that only the grammar chooses " * 3 + '"'
    grammar = LLMatcher.grammar_from_lark(f"start: (/[a-z]/ {forced})+")
    wanted = [
        msgspec.structs.replace(request, grammar=grammar, sampling=SamplingParams(max_tokens=90, seed=i, logprobs=1))
        for i, request in enumerate(requests()[:6])
    ]
    one_by_one = StructuredOutputsConfig(disable_jump_forward=True)
    expected, slow = run(model, wanted, vocabulary=vocabulary, structured_outputs_config=one_by_one, **KINDS[kind])
    for max_num_seqs in (1, 6):
        found, stats = run(model, wanted, vocabulary=vocabulary, max_num_seqs=max_num_seqs, **KINDS[kind])
        assert found == expected
        assert max_num_seqs == 1 or stats.num_steps < slow.num_steps / 2
