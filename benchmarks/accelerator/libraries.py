"""Prefill attention and experts' products by torch's own kernels, beside the engine's: the figures for choosing one.

    python -m benchmarks.accelerator.libraries --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

Independent of engines. Invariants: every way computes the same numbers, or is wrong; calls are replayed from a graph;
what a library needs beforehand (contiguous keys, sorted tokens) is not counted, so a library that is slower here is
slower in an engine; a way that torch or the device does not have is reported as refused, with torch's reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from .attention_cases import BLOCK_SIZE, Case, Step
from .attention_sweep import flops_of
from .experts import LAYERS, Layer
from .experts import TINY as TINY_LAYERS
from .section import Section, run_alone, seconds_in_graph
from .shapes import SHAPES

MAX_ERROR = 0.03
"""Relative, of all numbers together: bfloat16 results of different orders of sums."""
EXPERT_TOKENS, FEW_TOKENS = (256, 2048, 8192), (32,)
OWN = "own"

Call = Callable[[], Any]


def measure(section: Section) -> None:
    wrong = []
    for line in (*_attention(section), *_experts(section)):
        section.add(measure="library", **line)
        wrong += [f"{line['case']}, {line['kind']}: {line['error']:.3f}"] if line.get("error", 0.0) > MAX_ERROR else []
    section.fail(wrong)


def _attention(section: Section) -> Iterator[dict[str, Any]]:
    import torch

    shape = SHAPES[section.shape]
    parts = {"1 x 2048": ((2048, 2048),), "16 x 1024": ((1024, 1024),) * 16, "2048 after 6144": ((8192, 2048),)}
    if not section.on_gpu:
        parts = {"2 x 40": ((40, 40),) * 2, "8 after 32": ((40, 8),)}
    for name, own in parts.items():
        case = Case(shape.head_dim, shape.num_heads, shape.num_kv_heads, own, max_seq_len=8192, name=f"prefill {name}")
        step = Step(case, torch.device(section.device))
        given = _Prepared(step)
        ways: dict[str, Call] = {
            OWN: partial(_own, step),
            "varlen_attn": partial(_varlen, step, given),
            "varlen_attn, FA3, paged": partial(_paged_varlen, step, given),
            "flash, dense": partial(_dense, step, given, "FLASH_ATTENTION"),
            "cuDNN, dense": partial(_dense, step, given, "CUDNN_ATTENTION"),
        }
        yield from _lines(case.name, ways, flops_of(case), section.device)


def _lines(case: str, ways: Mapping[str, Call], flops: float, device: str) -> Iterator[dict[str, Any]]:
    """ways: each computes the same, after it has prepared itself in its first call."""
    import torch

    expected = None
    for way, call in ways.items():
        line = {"case": case, "kind": way}
        try:
            found = call().float().clone()
            expected = found if expected is None else expected
            error = float((found - expected).norm() / expected.norm())
            call_s = seconds_in_graph([call], torch.device(device))
        except (ImportError, RuntimeError, TypeError, ValueError) as failure:  # torch, device or shape without it
            yield {**line, "refused": f"{type(failure).__name__}: {failure}"[:200]}
            continue
        yield {**line, "call_s": call_s, "error": error, "flops": flops}


class _Prepared:
    """What a library reads instead of the engine's blocks."""

    def __init__(self, step: Step) -> None:
        import torch

        case = step.case
        self.queries = step.qkv[:, : case.num_heads * case.head_dim].unflatten(1, (case.num_heads, case.head_dim))
        lengths, counts = zip(*case.parts, strict=True)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=step.device)
        self.max_length, self.max_count = max(lengths), max(counts)
        self.query_ends, self.key_ends = (
            torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=step.device)
            for sizes in (counts, lengths)
        )
        self.table = step.table.clamp_max(len(step.cache.keys) - 1)  # places that no sequence reaches are not read
        self.keys, self.values = (self._gathered(step, memory) for memory in (step.cache.keys, step.cache.values))

    def _gathered(self, step: Step, memory: Any) -> Any:
        """[keys of all sequences, num_kv_heads, head_dim]."""
        import torch

        rows = []
        for row, (length, _) in enumerate(step.case.parts):
            at = torch.arange(length, device=step.device)
            rows.append(memory[step.table[row, at // BLOCK_SIZE].long(), :, at % BLOCK_SIZE])
        return torch.cat(rows)


def _own(step: Step) -> Any:
    step.launch()
    return step.out


def _varlen(step: Step, given: _Prepared) -> Any:
    """By the FlashAttention that torch contains, which has no paging: keys lie one behind the other."""
    from torch.nn.attention.varlen import varlen_attn

    found: Any = varlen_attn(
        given.queries, given.keys, given.values, given.query_ends, given.key_ends, given.max_count, given.max_length,
        scale=step.spec.scaling, window_size=(-1, 0), enable_gqa=True,
    )  # fmt: skip
    return found.flatten(1)


def _paged_varlen(step: Step, given: _Prepared) -> Any:
    """By FlashAttention 3, a package of its own, from the engine's blocks."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    keys, values = (memory.transpose(1, 2) for memory in (step.cache.keys, step.cache.values))
    activate_flash_attention_impl("FA3")
    try:
        found: Any = varlen_attn(
            given.queries, keys, values, given.query_ends, None, given.max_count, given.max_length,
            scale=step.spec.scaling, window_size=(-1, 0), enable_gqa=True, seqused_k=given.lengths,
            block_table=given.table,
        )  # fmt: skip
        return found.flatten(1)
    finally:
        restore_flash_attention_impl()


def _dense(step: Step, given: _Prepared, backend: str) -> Any:
    """Of prompts of one length, from the first token on."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length, count = step.case.parts[0]
    if length != count:
        raise ValueError("the mask of dense attention begins with the first key")
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (given.queries, given.keys, given.values))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=step.spec.scaling, enable_gqa=True
        )
    return found.transpose(1, 2).reshape(step.out.shape)


def _experts(section: Section) -> Iterator[dict[str, Any]]:
    """A layer's experts of plain weights: the engine's whole layer, and a library's two products and gate alone."""
    name = "qwen3-30b-a3b" if section.on_gpu else "tiny"
    for count in EXPERT_TOKENS if section.on_gpu else FEW_TOKENS:
        layer = Layer(name, count, section.device)
        rows, logits = layer.tokens(count)
        out, sizes = rows.clone(), {**LAYERS, **TINY_LAYERS}[name]
        ways: dict[str, Call] = {
            OWN: partial(_mixed, layer, rows, logits, out),
            "grouped_mm, products alone": _GroupedProducts(layer, rows, logits),
        }
        flops = 6.0 * count * sizes.top_k * sizes.width * sizes.size
        yield from _lines(f"experts of {name}, {count} tokens", ways, flops, section.device)


def _mixed(layer: Layer, rows: Any, logits: Any, out: Any) -> Any:
    from llmbackend.engine.gpu.ops.triton_ops import TritonOps

    layer.mix(TritonOps(), rows, logits, out)
    return out


class _GroupedProducts:
    """Sorted tokens and the ends of their experts are made once; the weighted sum of the first call is for checking."""

    def __init__(self, layer: Layer, rows: Any, logits: Any) -> None:
        import torch

        from llmbackend.engine.gpu.weights.experts import DenseExperts

        chosen, weights = layer.chosen(logits), (layer.spec.gate_up.weight, layer.spec.down.weight)
        self._weights = [weight for weight in weights if isinstance(weight, DenseExperts)]
        order = chosen.flatten().argsort(stable=True)
        self._tokens = order // chosen.shape[1]
        self._rows, self._shape = rows[self._tokens], rows.shape
        counts = torch.bincount(chosen.flatten(), minlength=layer.sizes.count)
        self._ends = counts.cumsum(0).int()
        shares = torch.softmax(logits.float(), -1).gather(1, chosen)
        self._shares = (shares / shares.sum(-1, keepdim=True)).flatten()[order]
        self._is_checked = False

    def __call__(self) -> Any:
        import torch

        gate_up, down = (weight.tensor.transpose(1, 2) for weight in self._weights)
        gate, up = torch.nn.functional.grouped_mm(self._rows, gate_up, offs=self._ends).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        found = torch.nn.functional.grouped_mm(inner, down, offs=self._ends)
        if self._is_checked:
            return found
        self._is_checked = True
        summed = torch.zeros(self._shape, dtype=torch.float32, device=found.device)
        return summed.index_add_(0, self._tokens, found.float() * self._shares[:, None])


if __name__ == "__main__":
    run_alone("libraries", measure)
