"""The cost of LoRA adapters on a CPU: decode steps and prompts of rows with eight adapters, with one, and without; and
a stream's pauses while other adapters are read.

    python -m benchmarks --lora                                             writes docs/benchmarks_lora.md
    python -m benchmarks.loras [--shape qwen2.5-0.5b-shape] [--rows 8] [--rank 16] [--kinds bfloat16,int8,int4]
    python -m benchmarks.loras --known 1000 --in-memory 32 [...]

Independent of servers and of the page; the engine runs in this process, with random weights. Invariants:
cases alternate in one engine, with the same prompts and as many tokens of each row; a ratio compares consecutive
measurements, and the median of all ratios is shown; rows with adapters must get different tokens than without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.checkpoints import SHAPES
from benchmarks.lora_report import WITHOUT, lora_tables
from benchmarks.perplexity import WEIGHT_TYPES
from benchmarks.report import Line
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams

KINDS = ("bfloat16", "int8", "int4")
ADAPTERS = 8
PROMPT_TOKENS = 16
LONG_PROMPT_TOKENS = 512
FOLDERS = 64
"""Of adapters that only names tell apart."""
STREAM_TOKENS = 4000
"""Of the stream whose pauses are measured: more than are generated meanwhile."""


def write_adapter(model: Any, folder: Path, rank: int, seed: int) -> None:
    """As PEFT does, for every linear layer; of a size that changes tokens."""
    import torch
    from safetensors.torch import save_file

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


def measure(config: EngineConfig, rows: int, num_tokens: int, rounds: int) -> list[Line]:
    """Tokens per second by case and round. Raises RuntimeError if a row with an adapter gets the tokens of none."""
    names = list(config.lora_modules)
    core = EngineCore(config, make_runner(config))
    cases: dict[str, list[str]] = {WITHOUT: [], "one adapter": names[:1], f"{len(names)} adapters": names}
    for adapters in cases.values():
        decode(core, adapters, rows, 4)
    lines: list[Line] = []
    for round_number in range(rounds):
        decoded = {case: decode(core, adapters, rows, num_tokens) for case, adapters in cases.items()}
        _check_tokens(decoded)
        for case, run in decoded.items():
            lines.append(_line(f"{rows} rows", case, round_number, run.rate))
        for case in list(cases)[:2]:
            rate = prompt(core, cases[case]).rate
            lines.append(_line(f"a prompt of {LONG_PROMPT_TOKENS}", case, round_number, rate))
    core.close()
    return lines


def _line(rows: str, case: str, round_number: int, rate: float) -> Line:
    return {"rows": rows, "case": case, "round": round_number, "tokens_per_s": rate}


def _check_tokens(decoded: dict[str, Run]) -> None:
    plain = decoded[WITHOUT].tokens
    for case, run in decoded.items():
        same = [row for row, tokens in run.tokens.items() if tokens == plain[row]]
        if case != WITHOUT and same:
            raise RuntimeError(f"{case}: rows {', '.join(same)} got the tokens of no adapter")


def measure_reads(config: EngineConfig, rows: int, num_tokens: int, num_requests: int) -> list[Line]:
    """One stream without an adapter beside rows of which each next request names another of the known adapters."""
    core = EngineCore(config, make_runner(config))
    draw = random.Random(0)
    names = [draw.choice(list(config.lora_modules)) for _ in range(num_requests)]
    stream = f"{num_requests}"
    lines = []
    for case, adapters in ((WITHOUT, [""] * num_requests), ("another adapter for each request", names)):
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
        rate = num_requests * num_tokens / (time.perf_counter() - began_s)
        core.abort(stream)
        while core.has_work:
            core.step()
        cuts = statistics.quantiles(gaps_ms[1:], n=100)
        pauses = {"pause_p50_ms": cuts[49], "pause_p99_ms": cuts[98], "pause_max_ms": max(gaps_ms[1:])}
        lines.append(_line(f"{len(config.lora_modules):,} known adapters", case, 0, rate) | pauses)
    core.close()
    return lines


@dataclass(frozen=True)
class LoraSuite:
    """known: adapters by name, of which in_memory stay in memory, for `run_reads`; num_requests: those it serves."""

    shape: str = "qwen2.5-0.5b-shape"
    rows: int = 8
    rank: int = 16
    num_tokens: int = 32
    """Of each row."""
    rounds: int = 7
    num_threads: int = 0
    known: int = 1000
    in_memory: int = 32
    num_requests: int = 120

    def run(self, kinds: Sequence[str], add: Callable[[Line], None]) -> None:
        """Decode steps and prompts."""
        with self._configs(kinds, ADAPTERS, ADAPTERS) as configs:
            for kind, config in configs.items():
                self._add(kind, measure(config, self.rows, self.num_tokens, self.rounds), add)

    def run_reads(self, kinds: Sequence[str], add: Callable[[Line], None]) -> None:
        """Pauses of a stream."""
        with self._configs(kinds, FOLDERS, self.known) as configs:
            for kind, config in configs.items():
                config = msgspec.structs.replace(config, max_model_len=4096, max_cpu_loras=self.in_memory)
                self._add(kind, measure_reads(config, self.rows, self.num_tokens, self.num_requests), add)

    def _add(self, kind: str, lines: list[Line], add: Callable[[Line], None]) -> None:
        for line in lines:
            add({"model": self.shape, "weights": kind, "rank": self.rank, **line, "time": round(time.time())})

    @contextlib.contextmanager
    def _configs(self, kinds: Sequence[str], num_folders: int, num_names: int) -> Iterator[dict[str, EngineConfig]]:
        """By kind of weights."""
        with tempfile.TemporaryDirectory() as directory:
            model = SHAPES[self.shape]()
            model.save_pretrained(directory)
            folders = [Path(directory) / f"adapter{i}" for i in range(num_folders)]
            for seed, folder in enumerate(folders):
                write_adapter(model, folder, self.rank, seed)
            names = [f"adapter{i}" for i in range(num_names)]
            config = EngineConfig(
                model=directory,
                load_format="dummy",
                num_threads=self.num_threads,
                max_model_len=1024,
                max_num_seqs=self.rows,
                max_num_batched_tokens=LONG_PROMPT_TOKENS,
                num_kv_blocks=512,
                enable_prefix_caching=False,
                step_target_ms=0,
                enable_lora=True,
                lora_modules={name: str(folder) for name, folder in zip(names, cycle(folders), strict=False)},
                max_lora_rank=self.rank,
            )
            yield {kind: msgspec.structs.replace(config, **WEIGHT_TYPES[kind]) for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default=LoraSuite.shape)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(WEIGHT_TYPES)}")
    parser.add_argument("--rows", type=int, default=LoraSuite.rows)
    parser.add_argument("--rank", type=int, default=LoraSuite.rank)
    parser.add_argument("--tokens", type=int, default=LoraSuite.num_tokens, help="of each row")
    parser.add_argument("--rounds", type=int, default=LoraSuite.rounds)
    parser.add_argument("--threads", type=int, default=LoraSuite.num_threads)
    parser.add_argument("--known", type=int, help="adapters by name; measures a stream's pauses while others are read")
    parser.add_argument("--in-memory", type=int, default=LoraSuite.in_memory, help="of the known adapters")
    parser.add_argument("--requests", type=int, default=LoraSuite.num_requests, help="for known adapters")
    arguments = parser.parse_args()
    suite = LoraSuite(
        shape=arguments.shape,
        rows=arguments.rows,
        rank=arguments.rank,
        num_tokens=arguments.tokens,
        rounds=arguments.rounds,
        num_threads=arguments.threads,
        known=arguments.known or LoraSuite.known,
        in_memory=arguments.in_memory,
        num_requests=arguments.requests,
    )
    lines: list[Line] = []
    (suite.run_reads if arguments.known else suite.run)(arguments.kinds.split(","), lines.append)
    print(lora_tables(lines))


if __name__ == "__main__":
    main()
