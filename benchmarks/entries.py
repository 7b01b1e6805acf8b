"""The entries of the comparison: each engine in each form that could be its fastest on some machine.

For: the runner and the report. Does not know: how they are measured. Invariants: an entry's name always means the same
engine, weights and options. Classes are compared within themselves: "bf16" is a bfloat16 checkpoint without
quantisation, however an engine chooses to compute with it (processors without bfloat16 arithmetic are often faster in
float32); "int8" is that checkpoint quantised to 8 bits. The report takes each engine's fastest entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OURS = "llmbackend"
Weights = Literal["bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`model` is a name in models.py with {} for the shape; `max_rounds` limits the rounds of a slow engine.

    Entries that are not `by_default` run only if they are named."""

    name: str
    engine: str
    weights: Weights
    environment: str
    driver: str
    model: str = "{}"
    options: tuple[str, ...] = ()
    max_rounds: int = 1000
    by_default: bool = True
    environ: dict[str, str] = field(default_factory=dict)


def _ours(name: str, weights: Weights, *options: str, by_default: bool = True) -> Entry:
    return Entry(
        name=name,
        engine=OURS,
        weights=weights,
        environment="ours",
        driver="llmbackend_bench",
        options=("--", *options),
        by_default=by_default,
    )


def _vllm(name: str, weights: Weights, model: str, *options: str, by_default: bool = True) -> Entry:
    return Entry(
        name=name,
        engine="vLLM",
        weights=weights,
        environment="vllm",
        driver="vllm_cpu",
        model=model,
        options=options,
        by_default=by_default,
    )


def _openvino(name: str, weights: Weights, kind: str, precision: str, by_default: bool = True) -> Entry:
    return Entry(
        name=name,
        engine="OpenVINO GenAI",
        weights=weights,
        environment="openvino",
        driver="openvino_batching",
        model=f"{{}}-openvino-{kind}",
        options=("--precision", precision),
        by_default=by_default,
    )


def _llama_cpp(name: str, weights: Weights, kind: str, by_default: bool = True) -> Entry:
    return Entry(
        name=name,
        engine="llama.cpp",
        weights=weights,
        environment="llama.cpp",
        driver="llama_cpp_batching",
        model=f"{{}}-{kind}.gguf",
        max_rounds=1,
        by_default=by_default,
    )


def _transformers(dtype: str, by_default: bool = True) -> Entry:
    return Entry(
        name=f"transformers-{dtype}",
        engine="transformers CB",
        weights="bf16",
        environment="transformers",
        driver="transformers_batching",
        options=("--dtype", dtype),
        max_rounds=1,
        by_default=by_default,
        environ={"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"},
    )


ENTRIES = {
    entry.name: entry
    for entry in (
        _ours("llmbackend-bfloat16", "bf16", "--dtype", "bfloat16"),
        _ours("llmbackend-float32", "bf16", "--dtype", "float32", by_default=False),
        _ours("llmbackend-int8", "int8", "--dtype", "bfloat16", "--quantization", "int8"),
        _vllm("vllm-bfloat16", "bf16", "{}", "--dtype", "bfloat16"),
        _vllm("vllm-float32", "bf16", "{}", "--dtype", "float32"),
        _vllm("vllm-w8a8-bfloat16", "int8", "{}-w8a8", "--dtype", "bfloat16"),
        _vllm("vllm-w8a8-float32", "int8", "{}-w8a8", "--dtype", "float32"),
        _openvino("openvino-f32", "bf16", "fp16", "f32"),
        _openvino("openvino-bf16", "bf16", "fp16", "bf16", by_default=False),
        _openvino("openvino-int8", "int8", "int8", "f32"),
        _openvino("openvino-int8-bf16", "int8", "int8", "bf16", by_default=False),
        _llama_cpp("llama.cpp-f16", "bf16", "f16"),
        _llama_cpp("llama.cpp-bf16", "bf16", "bf16", by_default=False),
        _llama_cpp("llama.cpp-q8_0", "int8", "q8_0"),
        _transformers("float32"),
        _transformers("bfloat16", by_default=False),
    )
}
