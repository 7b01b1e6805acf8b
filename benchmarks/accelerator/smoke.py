"""Whether the accelerator path works at all: an engine starts as one program, and equal requests get equal tokens.

    python -m benchmarks.accelerator.smoke --shape qwen2.5-0.5b --device cuda --json FILE --scratch FOLDER

For the first minute on a new machine. Independent of speed. Invariants: a model that runs as modules fails; the load
has compared the program's logits with the modules' already (GpuProgram.verify); tokens are compared between the same
request's first run, its second (from the prefix cache) and one run together with others.
"""

from __future__ import annotations

from .engines import engine_config, generated, infer_request, requests_of, why_slow
from .section import Section, run_alone
from .shapes import SHAPES

PROMPT_TOKENS, OUTPUT_TOKENS = 80, 16


def measure(section: Section) -> None:
    from llmbackend.engine.make_runner import make_runner
    from llmbackend.engine.offline import OfflineEngine

    config = engine_config(section, max_num_seqs=16)
    with OfflineEngine(config, make_runner) as engine:
        info, modules = engine.info, why_slow(section, engine)
        section.add(measure="loaded", load_s=info.load_s, description=info.description, num_blocks=info.num_blocks)
        prompts = [r.prompt for r in requests_of(SHAPES[section.shape], [(PROMPT_TOKENS, OUTPUT_TOKENS)] * 8)]
        ways = [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 40}, {}]
        requests = [
            infer_request(str(i), prompt, OUTPUT_TOKENS, **ways[i % len(ways)]) for i, prompt in enumerate(prompts)
        ]
        together, again = generated(engine, requests), generated(engine, requests)
        alone = {name: tokens for r in requests for name, tokens in generated(engine, [r]).items()}
    wrong = [f"request {name} got other tokens {how}" for how, tokens in (("again", again), ("alone", alone))
             for name in together if tokens[name] != together[name]]  # fmt: skip
    section.add(measure="tokens", requests=len(requests), different=len(wrong))
    # cuBLAS chooses a kernel by the number of rows: only batch-invariant products promise the same tokens.
    section.fail([*modules, *(wrong if config.batch_invariant or not section.on_gpu else [])])


if __name__ == "__main__":
    run_alone("smoke", measure)
