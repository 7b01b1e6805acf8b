"""Whether graphs, overlap, the prefix cache or preemption change a token, compared with an engine without them.

    python -m benchmarks.accelerator.equality --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

Checks the rule that a request's tokens do not depend on how its steps are executed. Independent of speed. Invariants:
requests share a prefix, more run than KV memory holds, so that some are preempted and computed again, and half draw
with top_p; the other engine has memory for all; with `batch_invariant` every token must be equal; with the library's
products, which depend on the number of rows, only the number of differing requests is reported.
"""

from __future__ import annotations

import random
from typing import Any

from .engines import engine_config, infer_request, steps
from .section import Section, run_alone
from .shapes import SHAPES

REQUESTS, SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 48, 128, 40, 48
BLOCKS = 128
"""Of 32 tokens: about a third of what all requests need."""
PLAIN: dict[str, Any] = {"async_scheduling": False, "enable_prefix_caching": False, "num_kv_blocks": 8 * BLOCKS}


def measure(section: Section) -> None:
    invariant: dict[str, Any] = {"batch_invariant": True} if section.on_gpu else {}
    scale = 1 if section.on_gpu else 4
    plainly = {**PLAIN, "enforce_eager": section.on_gpu}  # on a CPU: other kernels, which round in another way
    found, plain = (_tokens(section, scale, **invariant, **more) for more in ({}, plainly))
    different = [f"request {name} got other tokens" for name in found if found[name] != plain[name]]
    section.add(measure="equality", case="in the same order of sums", requests=len(found), different=len(different))
    if section.on_gpu:
        found, other = _tokens(section, scale), _tokens(section, scale, **plainly)
        count = sum(found[name] != other[name] for name in found)
        section.add(measure="equality", case="the library's products", requests=len(found), different=count)
    section.fail(different)


def _tokens(section: Section, scale: int, **arguments: Any) -> dict[str, list[int]]:
    """Each request's tokens. Raises RuntimeError where there was nothing to try: no preemption, or no shared prefix."""
    from llmbackend.engine.make_runner import make_runner
    from llmbackend.engine.offline import OfflineEngine

    limits = {"num_kv_blocks": BLOCKS // scale, "max_num_seqs": REQUESTS // scale, "max_num_batched_tokens": 512}
    config = engine_config(section, **{**limits, **arguments})
    tokens: dict[str, list[int]] = {}
    with OfflineEngine(config, make_runner) as engine:
        for result in steps(engine, _requests(section, scale)):
            stats = result.stats
            for output in result.outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    if config.enable_prefix_caching and not (stats.num_preemptions and stats.prefix_cache_hits):
        raise RuntimeError(f"{stats.num_preemptions} preemptions, {stats.prefix_cache_hits} cached tokens: none to try")
    return tokens


def _requests(section: Section, scale: int) -> list[Any]:
    draw, vocab_size = random.Random(5), SHAPES[section.shape].vocab_size

    def prompt(count: int) -> list[int]:
        return [draw.randrange(3, vocab_size) for _ in range(count)]

    shared = prompt(SHARED_TOKENS)
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_p": 0.9})
    return [
        infer_request(str(i), shared + prompt(OWN_TOKENS + i), OUTPUT_TOKENS, **({"seed": i} | ways[i % 2]))
        for i in range(REQUESTS // scale)
    ]


if __name__ == "__main__":
    run_alone("equality", measure)
