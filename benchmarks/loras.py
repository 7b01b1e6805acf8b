"""The cost of LoRA adapters on a CPU: decode steps and prompts of rows with eight adapters, with one, and without; and
a stream's pauses while other adapters are read.

    python -m benchmarks.loras [--shape qwen2.5-0.5b-shape] [--rows 8] [--rank 16] [--kinds bfloat16,int8,int4]
    python -m benchmarks.loras --known 1000 --in-memory 32 [...]

For docs/benchmarks_lora.md. Independent of servers; the engine runs in this process, with random weights. Invariants:
cases alternate in one engine, with the same prompts and as many tokens of each row; a ratio compares consecutive
measurements, and the median of all ratios is shown; rows with adapters must get different tokens than without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import SHAPES
from benchmarks.perplexity import WEIGHT_TYPES
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams

ADAPTERS = 8
PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 512
FOLDERS = 64
"""Of adapters that only names tell apart."""
STREAM_TOKENS = 4000
"""Of the stream whose pauses are measured: more than are generated meanwhile."""


def write_adapter(model: Any, folder: Path, rank: int, seed: int) -> None:
    """As PEFT does, for every linear layer; of a size that changes tokens."""
    heads = model.hidden_size // model.num_attention_heads
    width, inner, kv = model.hidden_size, model.intermediate_size, model.num_key_value_heads * heads
    linears = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model.num_hidden_layers):
        for name, (n, k) in linears.items():
            for side, size in (("A", (rank, k)), ("B", (n, rank))):
                matrix = torch.randn(size, generator=draw) * size[1] ** -0.5
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"] = matrix.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Run(NamedTuple):
    rate: float
    """Tokens per second of steps in which every row decodes, or of the prompts."""
    tokens: dict[str, list[int]]


def decode(core: EngineCore, adapters: Sequence[str], rows: int, num_tokens: int) -> Run:
    for row in range(rows):
        core.add(_request(row, PROMPT_TOKENS, num_tokens, adapters[row % len(adapters)] if adapters else ""))
    seconds, count = 0.0, 0
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        began_s = time.perf_counter()
        result = core.step()
        taken_s = time.perf_counter() - began_s
        for output in result.outputs:
            if output.error:
                raise RuntimeError(output.error)
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if len(result.outputs) == rows and all(len(each) > 1 for each in tokens.values()):
            seconds, count = seconds + taken_s, count + rows
    return Run(count / seconds, tokens)


def prompt(core: EngineCore, adapters: Sequence[str]) -> Run:
    core.add(_request(0, LONG_PROMPT_TOKENS, 1, adapters[0] if adapters else ""))
    began_s = time.perf_counter()
    while core.has_work:
        core.step()
    return Run(LONG_PROMPT_TOKENS / (time.perf_counter() - began_s), {})


def _request(row: int, prompt_tokens: int, num_tokens: int, adapter: str) -> InferRequest:
    return InferRequest(
        request_id=f"{row}",
        prompt_token_ids=tuple((31 * row + 7 * i) % 1000 + 3 for i in range(prompt_tokens)),
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        lora_name=adapter,
    )


def measure(config: EngineConfig, rows: int, num_tokens: int, rounds: int) -> None:
    names = list(config.lora_modules)
    core = EngineCore(config, make_runner(config))
    cases: dict[str, list[str]] = {"without": [], "one adapter": names[:1], f"{len(names)} adapters": names}
    for adapters in cases.values():
        decode(core, adapters, rows, 4)
    decoded: dict[str, list[Run]] = {case: [] for case in cases}
    prompts: dict[str, list[Run]] = {case: [] for case in list(cases)[:2]}
    for _ in range(rounds):
        for case, adapters in cases.items():
            decoded[case].append(decode(core, adapters, rows, num_tokens))
        for case in prompts:
            prompts[case].append(prompt(core, cases[case]))
    core.close()
    _report(f"{rows} rows", decoded)
    _report(f"a prompt of {LONG_PROMPT_TOKENS}", prompts)
    plain = decoded["without"][0].tokens
    for case in list(cases)[1:]:
        same = [row for row, tokens in decoded[case][0].tokens.items() if tokens == plain[row]]
        if same:
            print(f"  {case}: rows {', '.join(same)} got the tokens of no adapter")


def measure_reads(config: EngineConfig, rows: int, num_tokens: int, num_requests: int) -> None:
    """One stream without an adapter beside rows of which each next request names another of the known adapters."""
    core = EngineCore(config, make_runner(config))
    draw = random.Random(0)
    names = [draw.choice(list(config.lora_modules)) for _ in range(num_requests)]
    stream = f"{num_requests}"
    for case, adapters in (("without", [""] * num_requests), ("another adapter each", names)):
        core.add(_request(num_requests, PROMPT_TOKENS, STREAM_TOKENS, ""))
        left = list(enumerate(adapters))
        live: set[str] = set()
        gaps_ms, began_s, last_s = [], time.perf_counter(), 0.0
        while left or live:
            while left and len(live) < rows - 1:
                number, name = left.pop()
                request = _request(number, PROMPT_TOKENS, num_tokens, name)
                core.add(request)
                live.add(request.request_id)
            for output in core.step().outputs:
                if output.error:
                    raise RuntimeError(output.error)
                if output.request_id == stream:
                    now_s = time.perf_counter()
                    gaps_ms.append((now_s - last_s) * 1e3)
                    last_s = now_s
                elif output.finish_reason:
                    live.discard(output.request_id)
        taken_s = time.perf_counter() - began_s
        core.abort(stream)
        while core.has_work:
            core.step()
        cuts = statistics.quantiles(gaps_ms[1:], n=100)
        print(
            f"  {case}: {num_requests * num_tokens / taken_s:.1f} tokens/s; the stream pauses {cuts[49]:.0f} ms in "
            f"the median, {cuts[98]:.0f} ms at 99 %, at most {max(gaps_ms[1:]):.0f} ms",
            flush=True,
        )
    core.close()


def _report(what: str, runs: dict[str, list[Run]]) -> None:
    for case, of_case in runs.items():
        rate = statistics.median(run.rate for run in of_case)
        ratio = statistics.median(a.rate / b.rate for a, b in zip(of_case, runs["without"], strict=True))
        print(f"  {what}, {case}: {rate:.1f} tokens/s, {ratio:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b-shape")
    parser.add_argument("--kinds", default="bfloat16,int8,int4", help=f"of {', '.join(WEIGHT_TYPES)}")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--known", type=int, help="adapters by name; measures a stream's pauses while others are read")
    parser.add_argument("--in-memory", type=int, default=32, help="of the known adapters")
    parser.add_argument("--requests", type=int, default=200, help="for known adapters")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = SHAPES[arguments.shape]()
        model.save_pretrained(directory)
        folders = [Path(directory) / f"adapter{i}" for i in range(FOLDERS if arguments.known else ADAPTERS)]
        for seed, folder in enumerate(folders):
            write_adapter(model, folder, arguments.rank, seed)
        for kind in arguments.kinds.split(","):
            print(f"{arguments.shape}, {kind}, adapters of rank {arguments.rank}", flush=True)
            names = [f"adapter{i}" for i in range(arguments.known or ADAPTERS)]
            config = EngineConfig(
                model=directory,
                load_format="dummy",
                num_threads=arguments.threads,
                max_model_len=4096 if arguments.known else 1024,
                max_num_seqs=arguments.rows,
                max_num_batched_tokens=LONG_PROMPT_TOKENS,
                num_kv_blocks=512,
                enable_prefix_caching=False,
                step_target_ms=0,
                enable_lora=True,
                lora_modules={name: str(folder) for name, folder in zip(names, cycle(folders), strict=False)},
                max_cpu_loras=arguments.in_memory if arguments.known else None,
                max_lora_rank=arguments.rank,
                **WEIGHT_TYPES[kind],
            )
            if arguments.known:
                measure_reads(config, arguments.rows, arguments.tokens, arguments.requests)
            else:
                measure(config, arguments.rows, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
