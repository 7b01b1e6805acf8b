"""The entries of the comparison: each engine in each configuration that could be its fastest on some machine.

Used by the runner and the report. Independent of how they are measured. Invariants: an entry's name always means the
same engine, weights and options. Classes are compared within themselves: "bf16" is a bfloat16 checkpoint without
quantisation, however an engine chooses to compute with it (processors without bfloat16 arithmetic are often faster in
float32); "int8" is that checkpoint quantised to 8 bits; "q4_0", "q4_k_m" and "mxfp4" are GGUF files of these types, the
same file for ours and for llama.cpp, with OpenVINO's int4 compared with the first. The report takes each engine's
fastest entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OURS = "llmbackend"
Weights = Literal["bf16", "int8", "q4_0", "q4_k_m", "mxfp4"]
FOUR_BITS: tuple[Weights, ...] = ("q4_0", "q4_k_m", "mxfp4")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`model` is a name in models.py with {} for the shape.

    Entries that are not `by_default` run only if they are named, those in 4 bits by `python -m benchmarks.int4`."""

    name: str
    engine: str
    weights: Weights
    environment: str
    driver: str
    model: str = "{}"
    options: tuple[str, ...] = ()
    by_default: bool = True
    environ: dict[str, str] = field(default_factory=dict)


def _ours(name: str, weights: Weights, *options: str, model: str = "{}", by_default: bool = True) -> Entry:
    return Entry(
        name=name,
        engine=OURS,
        weights=weights,
        environment="ours",
        driver="llmbackend_bench",
        model=model,
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
        model=f"{{}}-{kind}",
        options=("--precision", precision),
        by_default=by_default,
    )


def _llama_cpp(name: str, weights: Weights, kind: str, *options: str, by_default: bool = True) -> Entry:
    return Entry(
        name=name,
        engine="llama.cpp",
        weights=weights,
        environment="llama.cpp",
        driver="llama_cpp_batching",
        model=f"{{}}-{kind}.gguf",
        options=options,
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
        _openvino("openvino-f32", "bf16", "openvino-fp16", "f32"),
        _openvino("openvino-bf16", "bf16", "openvino-fp16", "bf16", by_default=False),
        _openvino("openvino-int8", "int8", "openvino-int8", "f32"),
        _openvino("openvino-int8-bf16", "int8", "openvino-int8", "bf16", by_default=False),
        _llama_cpp("llama.cpp-f16", "bf16", "f16"),
        _llama_cpp("llama.cpp-bf16", "bf16", "bf16", by_default=False),
        _llama_cpp("llama.cpp-q8_0", "int8", "q8_0"),
        _ours("llmbackend-q4_0", "q4_0", model="{}-q4_0.gguf"),
        _llama_cpp("llama.cpp-q4_0", "q4_0", "q4_0"),
        _llama_cpp("llama.cpp-q4_0-plain-attention", "q4_0", "q4_0", "--flash-attention", "off"),
        _llama_cpp("llama.cpp-q4_0-no-repack", "q4_0", "q4_0", "--no-repack", by_default=False),
        _llama_cpp("llama.cpp-q4_0-no-mmap", "q4_0", "q4_0", "--no-mmap", by_default=False),
        _openvino("openvino-int4", "q4_0", "openvino-int4", "f32"),
        _openvino("openvino-int4-bf16", "q4_0", "openvino-int4", "bf16"),
        _openvino("openvino-q4_0", "q4_0", "q4_0.gguf", "f32", by_default=False),
        _ours("llmbackend-q4_k_m", "q4_k_m", model="{}-q4_k_m.gguf"),
        _llama_cpp("llama.cpp-q4_k_m", "q4_k_m", "q4_k_m"),
        _llama_cpp("llama.cpp-q4_k_m-plain-attention", "q4_k_m", "q4_k_m", "--flash-attention", "off"),
        _llama_cpp("llama.cpp-q4_k_m-no-repack", "q4_k_m", "q4_k_m", "--no-repack", by_default=False),
        _ours("llmbackend-mxfp4", "mxfp4", model="{}-mxfp4.gguf", by_default=False),
        _llama_cpp("llama.cpp-mxfp4", "mxfp4", "mxfp4", by_default=False),
        _ours("llmbackend-int4", "q4_0", "--dtype", "bfloat16", "--quantization", "int4", by_default=False),
        _transformers("float32"),
        _transformers("bfloat16", by_default=False),
    )
}


def default_entries(*weights: Weights) -> tuple[str, ...]:
    return tuple(name for name, entry in ENTRIES.items() if entry.by_default and entry.weights in weights)
