"""N-gram speculation on repetitive text: the same tokens as without it, in fewer steps, and its speed.

    python -m benchmarks.accelerator.speculation --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

For speculative_config. Independent of how often real text repeats; greedy output of random weights soon repeats itself
more than any. Invariants: with `batch_invariant` every token must be equal, and some drafts must have been accepted,
otherwise nothing was tested; speed is measured with the library's products.
"""

from __future__ import annotations

import random
import time
from typing import Any

from .engines import engine_config, infer_request, steps
from .section import Section, run_alone
from .shapes import SHAPES

PATTERN_TOKENS, REPEATS = 24, 8
BATCHES, FEW = (1, 8), 2
OUTPUT_TOKENS = 192
BLOCKS, GRAPHS = 256, (1, 5, 8, 40, 64)
"""More KV blocks than all requests need, since several engines come one after the other in one process; and steps of
one token or five of each request."""
SPECULATION = {"num_speculative_tokens": 4}


def measure(section: Section) -> None:
    wrong = []
    if section.on_gpu:
        for case, more in (("off", {}), ("on", {"speculative_config": SPECULATION})):
            _timed(section, case, more)
    invariant: dict[str, Any] = {"batch_invariant": True} if section.on_gpu else {}
    plain, _ = _run(section, max(BATCHES), **invariant)
    found, stats = _run(section, max(BATCHES), speculative_config=SPECULATION, **invariant)
    different = [f"request {name} got other tokens" for name in plain if found[name] != plain[name]]
    section.add(measure="equality", case="drafts", requests=len(plain), different=len(different))
    if not stats.num_accepted_tokens:
        wrong.append(f"none of {stats.num_draft_tokens} drafts was accepted: nothing was tried")
    section.fail(different + wrong)


def _timed(section: Section, case: str, more: dict[str, Any]) -> None:
    from llmbackend.engine.offline import OfflineEngine

    with OfflineEngine(_config(section, **more)) as engine:
        list(steps(engine, _requests(section, 2)))
        for batch in BATCHES:
            before, start_s = None, time.perf_counter()
            for result in steps(engine, _requests(section, batch)):
                before = before or result.stats
                stats = result.stats
            seconds = time.perf_counter() - start_s
            assert before is not None, "there were steps"
            section.add(
                measure="speculation",
                case=case,
                batch=batch,
                output_tokens_per_s=batch * OUTPUT_TOKENS / seconds,
                tokens_per_step=batch * OUTPUT_TOKENS / (stats.num_steps - before.num_steps + 1),
                accepted_share=_share(stats, before),
            )


def _share(stats: Any, before: Any) -> float:
    drafted = stats.num_draft_tokens - before.num_draft_tokens
    return float((stats.num_accepted_tokens - before.num_accepted_tokens) / max(drafted, 1))


def _run(section: Section, batch: int, **arguments: Any) -> tuple[dict[str, list[int]], Any]:
    """Each request's tokens, and the engine's counts."""
    from llmbackend.engine.offline import OfflineEngine

    tokens: dict[str, list[int]] = {}
    with OfflineEngine(_config(section, **arguments)) as engine:
        for result in steps(engine, _requests(section, batch if section.on_gpu else FEW)):
            for output in result.outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens, result.stats


def _config(section: Section, **arguments: Any) -> Any:
    from llmbackend.engine.config import SpeculativeConfig

    if "speculative_config" in arguments:
        arguments["speculative_config"] = SpeculativeConfig(**arguments["speculative_config"])
    limits: dict[str, Any] = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": 512, "num_kv_blocks": BLOCKS}
    limits |= {"enable_prefix_caching": False, "cudagraph_capture_sizes": GRAPHS}
    return engine_config(section, **limits, **arguments)


def _requests(section: Section, batch: int) -> list[Any]:
    draw, vocab_size = random.Random(9), SHAPES[section.shape].vocab_size
    output = OUTPUT_TOKENS if section.on_gpu else OUTPUT_TOKENS // 8
    patterns = [[draw.randrange(3, vocab_size) for _ in range(PATTERN_TOKENS)] for _ in range(batch)]
    return [infer_request(str(i), pattern * REPEATS, output) for i, pattern in enumerate(patterns)]


if __name__ == "__main__":
    run_alone("speculation", measure)
