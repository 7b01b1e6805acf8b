"""LoRA adapters: decode steps in which no, one or several adapters are asked for, compared with an engine without them.

    python -m benchmarks.accelerator.adapters --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

For what adapters cost (kernels/lora.py). Independent of what adapters were trained for. Invariants: random adapters of
rank RANK for every matrix of every layer; adapters are assigned to rows in turn; the same requests in every case; rows
with an adapter must get different tokens than without it, otherwise nothing was tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .engines import SCALE, decode_run, engine_config, infer_request, requests_of, steps, why_slow
from .section import Section, run_alone
from .shapes import SHAPES, Shape

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256, 48
ADAPTERS, FEW_ADAPTERS = 8, 2
RANK = 16
BLOCKS = 1024
"""Of 32 tokens: more than all hold. Two engines come one after the other in one process."""


def measure(section: Section) -> None:
    count = ADAPTERS if section.on_gpu else FEW_ADAPTERS
    folders = [section.scratch / f"{section.shape}-adapter-{i}" for i in range(count)]
    for i, folder in enumerate(folders):
        _write(SHAPES[section.shape], folder, i, section.device)
    modules = {folder.name: str(folder) for folder in folders}
    found = _run(section, list(modules), enable_lora=True, lora_modules=modules, max_loras=count, max_lora_rank=RANK)
    _run(section, [])
    same = [name for name, tokens in found[count].items() if tokens == found[0][name]]
    section.fail([f"request {name} got the tokens of no adapter" for name in same])


def _run(section: Section, names: list[str], **arguments: Any) -> dict[int, dict[str, list[int]]]:
    """Each request's tokens, by the number of adapters asked for."""
    from llmbackend.engine.offline import OfflineEngine

    rows = ROWS // SCALE.get(section.shape, 1)
    limits: dict[str, Any] = {"max_num_seqs": rows, "enable_prefix_caching": False, "num_kv_blocks": BLOCKS}
    limits["cudagraph_capture_sizes"] = (rows,)
    found = {}
    with OfflineEngine(engine_config(section, **limits, **arguments)) as engine:
        for count in sorted({0, min(1, len(names)), len(names)}):
            list(steps(engine, _requests(section, rows, names[:count], 2)))
            run = decode_run(engine, _requests(section, rows, names[:count], OUTPUT_TOKENS))
            case = f"{count} of {len(names)} adapters" if names else "an engine without adapters"
            section.add(measure="adapters", case=case, rows=rows, step_s=run.step_s)
            found[count] = run.tokens
        section.fail(why_slow(section, engine))
    return found


def _requests(section: Section, rows: int, names: list[str], output_tokens: int) -> list[Any]:
    import msgspec

    prompt_tokens = PROMPT_TOKENS // SCALE.get(section.shape, 1)
    plain = requests_of(SHAPES[section.shape], [(prompt_tokens, output_tokens)] * rows)
    return [
        msgspec.structs.replace(
            infer_request(str(i), request.prompt, request.output_tokens),
            lora_name=names[i % len(names)] if names else "",
        )
        for i, request in enumerate(plain)
    ]


def _write(shape: Shape, folder: Path, seed: int, device: str) -> None:
    """As PEFT does; weights of a size that changes tokens."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = torch.Generator(device).manual_seed(seed), {}
    for layer in range(shape.num_layers):
        for name, (n, k) in shape.linears().items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            for side, size in (("A", (RANK, k)), ("B", (n, RANK))):
                drawn = torch.randn(size, generator=random, device=device) * size[1] ** -0.5
                tensors[f"{prefix}.lora_{side}.weight"] = drawn.bfloat16().cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in shape.linears()]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    run_alone("adapters", measure)
