"""The cost of structured output: masks by row, steps with and without grammars, and the gain from forced tokens.

    python -m benchmarks.structured_outputs [--shape qwen2.5-0.5b-shape] [--rows 64] [--tokens 128] [--xgrammar]
        [--peers DIR]    # beside vLLM's CPU build, which is installed there if it is not

For docs/engine.md. Independent of servers; the engine runs in this process, with random weights and the shape's own
tokenizer. Invariant: runs that are compared alternate, on the same prompts, with as many tokens of each row. The
grammar is a schema with free strings and numbers, repeated in a list, so that no row ends early; the gain from forced
tokens is also measured with a schema that leaves little choice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from benchmarks.checkpoints import EOS_ID, SHAPES, write_tokenizer
from benchmarks.drivers.vllm_structured import ANSWER
from benchmarks.environments import Environments
from benchmarks.structured_schemas import RECORDS, SCHEMA
from llmbackend.engine.config import EngineConfig, StructuredOutputsConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.grammars import constraints
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams, Vocabulary


def requests(count: int, num_tokens: int, grammar: str) -> Iterator[InferRequest]:
    for i in range(count):
        yield InferRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple((31 * i + 7 * j) % 1000 + 3 for j in range(16)),
            sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=num_tokens),
            grammar=grammar,
            cache_salt=f"{i}",
        )


def run(core: EngineCore, count: int, num_tokens: int, grammar: str) -> tuple[float, float, int]:
    """Seconds of all steps with every row, tokens of them in a second, and their number."""
    for request in requests(count, num_tokens, grammar):
        core.add(request)
    seconds, tokens, steps = 0.0, 0, 0
    while core.has_work:
        started_s = time.perf_counter()
        result = core.step()
        for output in result.outputs:
            if output.error:
                raise RuntimeError(output.error)
        if len(result.outputs) == count:  # no step that computes prompts, and none in which rows have ended
            seconds += time.perf_counter() - started_s
            tokens += sum(len(output.token_ids) for output in result.outputs)
            steps += 1
    return seconds, tokens / seconds, steps


@contextmanager
def timed_masks() -> Iterator[list[float]]:
    """Seconds of each row's mask, with the tokens before it."""
    seconds: list[float] = []
    compute_row = constraints._compute_row

    def timed(job: Any, words: Any) -> list[str]:
        started_s = time.perf_counter()
        errors = compute_row(job, words)
        seconds.append(time.perf_counter() - started_s)
        return errors

    constraints._compute_row = timed
    try:
        yield seconds
    finally:
        constraints._compute_row = compute_row


def percentiles_us(seconds: list[float]) -> str:
    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
    return f"p50 {p50:.0f} µs, p99 {p99:.0f} µs of {len(seconds)}"


def measure(
    config: EngineConfig, vocabulary: Vocabulary, arguments: argparse.Namespace, grammar: str, peer: VllmPeer | None
) -> None:
    """Alternates without and with the grammar, and with the peer."""
    core = EngineCore(config, make_runner(config))
    core.set_vocabulary(vocabulary)
    run(core, 2, 8, grammar)
    rates: dict[str, list[float]] = {"": [], grammar: []}
    with timed_masks() as masks:
        for repeat in range(2 * arguments.repeats):
            which = grammar if repeat % 2 else ""
            rates[which].append(run(core, arguments.rows, arguments.tokens, which)[1])
            if peer is not None:
                peer.run(is_constrained=bool(which))
    core.close()
    free, bound = (statistics.median(rates[which]) for which in ("", grammar))
    print(f"  unconstrained {free:.1f} tokens/s, constrained {bound:.1f} tokens/s: {bound / free:.1%}")
    print(f"  masks: {percentiles_us(masks)}", flush=True)
    if peer is not None:
        print(f"  {peer.result()}", flush=True)


def measure_forced(config: EngineConfig, vocabulary: Vocabulary, name: str, grammar: str, num_tokens: int) -> None:
    """One row, with forced tokens one by one, and as drafts."""
    for is_off in (True, False):
        changed = StructuredOutputsConfig(disable_jump_forward=is_off)
        config = msgspec.structs.replace(config, structured_outputs_config=changed)
        core = EngineCore(config, make_runner(config))
        core.set_vocabulary(vocabulary)
        run(core, 1, 8, grammar)
        _, rate, steps = run(core, 1, num_tokens, grammar)
        core.close()
        form = "one by one" if is_off else "as drafts "
        print(f"  {name}, forced tokens {form}: {rate:.1f} tokens/s, {steps} steps", flush=True)


class VllmPeer:
    """vLLM in a process of its own, which waits while others are measured."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._rates: dict[bool, list[float]] = {False: [], True: []}
        self._description = self._ask("")

    def run(self, *, is_constrained: bool) -> None:
        self._rates[is_constrained].append(float(self._ask("constrained" if is_constrained else "free")))

    def result(self) -> str:
        free, bound = (statistics.median(self._rates[which]) for which in (False, True))
        return f"{self._description}: unconstrained {free:.1f}, constrained {bound:.1f} tokens/s: {bound / free:.1%}"

    def _ask(self, what: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        if what:
            print(what, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        raise RuntimeError(f"vLLM ended with exit code {self._process.wait()}")


@contextmanager
def vllm_peer(arguments: argparse.Namespace, model: str, quantization: str | None) -> Iterator[VllmPeer | None]:
    """None without --peers, and for int8, which vLLM reads from checkpoints of another form."""
    if arguments.peers is None or quantization is not None:
        yield None
        return
    peers = Environments(arguments.peers)
    peers.install("vllm")
    command = [str(peers.python("vllm")), "-m", "benchmarks.drivers.vllm_structured", "--model", model]
    command += ["--rows", str(arguments.rows), "--tokens", str(arguments.tokens)]
    environment = os.environ | {"LD_PRELOAD": peers.preload(), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield VllmPeer(process)
        finally:
            process.kill()


def compare_libraries(tokenizer_json: str, vocab_size: int, texts: list[str]) -> None:
    """Masks of llguidance and xgrammar along the same texts, one row."""
    import tokenizers
    import xgrammar  # type: ignore[import-not-found]
    from llguidance import LLTokenizer

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    llguidance_tokenizer = LLTokenizer(tokenizer_json, vocab_size, [EOS_ID])
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})

    def with_llguidance() -> tuple[Callable[[], object], Callable[[int], object]]:
        matcher = LLMatcher(llguidance_tokenizer, grammar)
        return lambda: matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes), matcher.consume_token

    vocabulary = [tokenizer.id_to_token(i) or "" for i in range(vocab_size)]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size, stop_token_ids=[EOS_ID]
    )
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def with_xgrammar() -> tuple[Callable[[], object], Callable[[int], object]]:
        compiled = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False, separators=(",", ":"))
        matcher = xgrammar.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(bitmask), matcher.accept_token

    for name, start in (("llguidance", with_llguidance), ("xgrammar", with_xgrammar)):
        seconds, compile_s = [], []
        for text in texts:
            started_s = time.perf_counter()
            fill, accept = start()
            fill()
            compile_s.append(time.perf_counter() - started_s)
            for token_id in tokenizer.encode(text).ids:
                started_s = time.perf_counter()
                fill()
                seconds.append(time.perf_counter() - started_s)
                accept(token_id)
        first_ms = ", ".join(f"{1e3 * one:.1f}" for one in compile_s[:3])
        print(f"  {name}: masks {percentiles_us(seconds)}; to the first mask {first_ms} ms", flush=True)


def sample_texts(count: int) -> list[str]:
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    items = [
        {"name": words[i % 10], "description": " ".join(words[: i % 7 + 2]), "count": 17 * i, "tags": words[: i % 3]}
        for i in range(count)
    ]
    return [json.dumps([item] * 3, separators=(",", ":"))[:-1] for item in items]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b-shape")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--xgrammar", action="store_true", help="also its masks; the package must be installed")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments: also vLLM, in bf16")
    arguments = parser.parse_args()
    grammar, records = (
        LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        for schema in (SCHEMA, RECORDS)
    )
    with tempfile.TemporaryDirectory() as directory:
        model = SHAPES[arguments.shape]()
        model.eos_token_id = EOS_ID
        model.save_pretrained(directory)
        write_tokenizer(Path(directory), model.vocab_size)
        tokenizer_json = (Path(directory) / "tokenizer.json").read_text(encoding="utf-8")
        vocabulary = Vocabulary(tokenizer_json=tokenizer_json)
        config = EngineConfig(
            model=directory,
            load_format="dummy",
            dtype="bfloat16",
            num_threads=arguments.threads,
            max_model_len=1024,
            max_num_seqs=arguments.rows,
            max_num_batched_tokens=32 * arguments.rows,
            step_target_ms=0,  # all prompts in one step, so that all rows decode together
            structured_outputs_config=StructuredOutputsConfig(disable_jump_forward=True),
        )
        for quantization in (None, "int8"):
            print(
                f"{arguments.shape}, {quantization or 'bfloat16'}, {arguments.rows} rows of {arguments.tokens} tokens"
            )
            chosen = msgspec.structs.replace(config, quantization=quantization)
            with vllm_peer(arguments, directory, quantization) as peer:
                measure(chosen, vocabulary, arguments, grammar, peer)
            for name, one in (("free strings", grammar), ("long names", records)):
                measure_forced(chosen, vocabulary, name, one, arguments.tokens)
        if arguments.xgrammar:
            compare_libraries(tokenizer_json, model.vocab_size, sample_texts(50))


if __name__ == "__main__":
    main()
