"""A layer's experts: compares results with float32, and time with that of reading the chosen experts.

    python -m benchmarks.accelerator.experts --device cuda --json FILE --scratch FOLDER

For kernels/experts.py. Independent of engines. Invariants: random numbers, so that tokens spread over all experts;
intermediate memory and the output are filled before a checked call; timed calls are replayed from a graph, each with
tokens that choose other experts than in the previous call.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .section import Section, copies_beyond_cache, in_parallel, run_alone, seconds_in_graph

CHECKED_TOKENS = (1, 17, 64, 256, 2048)
TIMED_TOKENS = (1, 16, 64, 256, 2048)
FEW = (2,)
"""Where there is no GPU."""
MXFP4_GROUP = 32
MAX_ERROR, MAX_ERROR_INTERPRETED = 1e-2, 3e-2
"""Relative, of all numbers together: three roundings to bfloat16. Triton's interpreter cuts off what a GPU rounds."""


@dataclass(frozen=True)
class Sizes:
    """size: of an expert's inner width. is_gpt_oss: with biases, its own gate, and inputs first in memory; is_mxfp4: of
    weights."""

    count: int
    top_k: int
    width: int
    size: int
    is_gpt_oss: bool = False
    is_mxfp4: bool = False

    @property
    def activation(self) -> Any:
        return "swigluoai" if self.is_gpt_oss else "silu"


_GPT_OSS = Sizes(32, 4, 2880, 2880, is_gpt_oss=True)
LAYERS = {
    "qwen3-30b-a3b": Sizes(128, 8, 2048, 768),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-20b, mxfp4": replace(_GPT_OSS, is_mxfp4=True),
}
TINY = {"tiny": Sizes(8, 2, 64, 32), "tiny, mxfp4": Sizes(8, 2, 64, 32, is_gpt_oss=True, is_mxfp4=True)}


def measure(section: Section) -> None:
    layers, wrong = LAYERS if section.on_gpu else TINY, []
    items = [(name, exact) for name in layers for exact in ((False, True) if section.on_gpu else (True,))]
    if section.wants("parity"):
        for lines in in_parallel(_Checks(section.device), items, section.on_gpu):
            for line in lines:
                section.add(measure="experts", **line)
                wrong += [f"{line['case']}: {line['wrong']}"] if line["wrong"] else []
    if section.wants("times"):
        if section.on_gpu:  # into Triton's cache, so that the layers behind wait for no compiler
            for _ in in_parallel(_Once(section.device), list(layers), True):
                pass
        for name in layers:
            layer = Layer(name, max(TIMED_TOKENS if section.on_gpu else FEW), section.device)
            for count in TIMED_TOKENS if section.on_gpu else FEW:
                section.add(measure="experts time", case=name, rows=count, **_timed(layer, count))
    section.fail(wrong)


class Layer:
    """Random experts on a device, and scratch memory for a step."""

    def __init__(self, name: str, max_tokens: int, device: str) -> None:
        import torch

        from llmbackend.engine.gpu.ops.ops import ExpertScratch, ExpertSpec
        from llmbackend.engine.gpu.weights.experts import ExpertProjection

        self.sizes = sizes = {**LAYERS, **TINY}[name]
        self.device = torch.device(device)
        self._random = torch.Generator(device).manual_seed(sizes.count)

        def projection(n: int, k: int) -> ExpertProjection:
            weight = self._mxfp4(n, k) if sizes.is_mxfp4 else self._dense(n, k)
            return ExpertProjection(weight, self.normal(sizes.count, n) if sizes.is_gpt_oss else None)

        projections = projection(2 * sizes.size, sizes.width), projection(sizes.width, sizes.size)
        self.spec = ExpertSpec(*projections, sizes.top_k, renormalises=True)
        self.scratch = ExpertScratch.of(max_tokens, [self.spec], torch.bfloat16, self.device)
        self.expert_numbers = 3 * sizes.width * sizes.size

    @property
    def expert_bytes(self) -> float:
        """Of one expert's weights."""
        bits_per_number = 4 + 8 / MXFP4_GROUP if self.sizes.is_mxfp4 else 16
        return self.expert_numbers * bits_per_number / 8

    def _dense(self, n: int, k: int) -> Any:
        from llmbackend.engine.gpu.weights.experts import DenseExperts

        weight = self.normal(self.sizes.count, *((k, n) if self.sizes.is_gpt_oss else (n, k))) * k**-0.5
        return DenseExperts(weight.transpose(1, 2) if self.sizes.is_gpt_oss else weight)

    def _mxfp4(self, n: int, k: int) -> Any:
        """Of a spread with which products keep the size of their input: without scales, numbers deviate by 2.9."""
        import torch

        from llmbackend.engine.gpu.weights.experts import Int4Experts
        from llmbackend.engine.gpu.weights.int4 import Int4Weight

        def drawn(least: int, above: int, *shape: int) -> Any:
            return torch.randint(least, above, shape, generator=self._random, device=self.device, dtype=torch.uint8)

        count, exponent = self.sizes.count, 127 + round(math.log2(k**-0.5 / 2.9))
        scale = drawn(exponent - 1, exponent + 2, count * n, k // MXFP4_GROUP)
        numbers = drawn(0, 16, count * n, k)
        return Int4Experts(Int4Weight.of(numbers, scale, None, MXFP4_GROUP, is_float=True), count)

    def normal(self, *shape: int) -> Any:
        import torch

        return torch.randn(*shape, generator=self._random, device=self.device, dtype=torch.bfloat16)

    def tokens(self, count: int) -> tuple[Any, Any]:
        """Rows, and router logits."""
        return self.normal(count, self.sizes.width), self.normal(count, self.sizes.count)

    def chosen(self, logits: Any) -> Any:
        """[tokens, top_k]: of equal logits the first."""
        return logits.float().sort(dim=-1, descending=True, stable=True).indices[:, : self.sizes.top_k]

    def mix(self, ops: Any, rows: Any, logits: Any, out: Any) -> None:
        ops.mix_experts(rows, logits, self.spec, self.sizes.activation, self.scratch, out)


class _Checks:
    """All lines of a layer, by tiles that depend on the number of tokens or not."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, item: tuple[str, bool]) -> list[dict[str, Any]]:
        name, exact = item
        counts = FEW if self._device == "cpu" else CHECKED_TOKENS
        layer, how = Layer(name, max(counts), self._device), ", exact" if exact else ""
        return [{"case": f"{name}, {count} tokens{how}", **_checked(layer, count, exact)} for count in counts]


def _checked(layer: Layer, count: int, exact: bool) -> dict[str, Any]:
    import torch

    from llmbackend.engine.gpu.ops.triton_ops import TritonOps

    ops, (rows, logits) = TritonOps(exact_products=exact), layer.tokens(count)

    def mixed(rows: Any, logits: Any) -> Any:
        for name in layer.scratch.__slots__:
            getattr(layer.scratch, name).fill_(77)
        out = torch.full_like(rows, float("nan"))
        layer.mix(ops, rows, logits, out)
        return out

    try:
        found, expected = mixed(rows, logits), _expected(layer, rows, logits)
        error = float((found.float() - expected).norm() / expected.norm())
        wrong = "" if error <= (MAX_ERROR if rows.is_cuda else MAX_ERROR_INTERPRETED) else "far from float32"
        if not torch.equal(mixed(rows, logits), found):
            wrong = "not the same again"
        if exact and not torch.equal(mixed(rows[-1:], logits[-1:])[0], found[-1]):
            wrong = wrong or "the last token is not the same alone"
    except Exception as failure:  # of a kernel that does not compile or does not run
        return {"wrong": f"{type(failure).__name__}: {failure}"[:300]}
    return {"error": error, "wrong": wrong}


def _expected(layer: Layer, rows: Any, logits: Any) -> Any:
    """float32 [tokens, width], an expert at a time."""
    import torch

    from llmbackend.engine.gpu.ops.ops import gated

    def product(x: Any, projection: Any, expert: int) -> Any:
        found = x @ projection.weight.matrix(expert, torch.float32).t()
        return found if projection.bias is None else found + projection.bias[expert].float()

    chosen, shares = layer.chosen(logits), torch.softmax(logits.float(), -1)
    factors = shares.gather(1, chosen)
    factors /= factors.sum(-1, keepdim=True)
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        inner = gated(product(rows[token].float(), layer.spec.gate_up, expert), layer.sizes.activation)
        out[token] += factors[token, place, None] * product(inner, layer.spec.down, expert)
    return out


class _Once:
    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, name: str) -> None:
        from llmbackend.engine.gpu.ops.triton_ops import TritonOps

        layer = Layer(name, max(TIMED_TOKENS), self._device)
        for count in TIMED_TOKENS:
            rows, logits = layer.tokens(count)
            with contextlib.suppress(Exception):  # the line of its time says so
                layer.mix(TritonOps(), rows, logits, rows.clone())


def _timed(layer: Layer, count: int) -> dict[str, Any]:
    from llmbackend.engine.gpu.ops.triton_ops import TritonOps

    ops, expert_bytes = TritonOps(), layer.expert_bytes
    at_most = int(min(layer.sizes.count, count * layer.sizes.top_k) * expert_bytes)
    steps = [layer.tokens(count) for _ in range(copies_beyond_cache(at_most, layer.device))]
    out = steps[0][0].clone()
    try:
        calls = [partial(layer.mix, ops, rows, logits, out) for rows, logits in steps]
        call_s = seconds_in_graph(calls, layer.device)
    except Exception as failure:  # a kernel that does not compile
        return {"refused": f"{type(failure).__name__}: {failure}"[:200]}
    read = sum(len(layer.chosen(logits).unique()) for _, logits in steps) / len(steps)
    flops = 2.0 * count * layer.sizes.top_k * layer.expert_numbers
    return {"call_s": call_s, "floor_bytes": read * expert_bytes, "flops": flops}


if __name__ == "__main__":
    run_alone("experts", measure)
