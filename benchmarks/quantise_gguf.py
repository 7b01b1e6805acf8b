"""Quantises a GGUF file with llama.cpp's own quantiser, each tensor to the type that llama.cpp chooses.

python -m benchmarks.quantise_gguf FILE.gguf NEW_FILE.gguf q4_0|q4_1|q4_k_m
"""

from __future__ import annotations

import ctypes
import sys

from .drivers import llama_cpp_bindings

KINDS = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}


def main() -> None:
    source, target, kind = sys.argv[1:]
    lib = llama_cpp_bindings.load()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = getattr(lib, KINDS[kind])
    if code := lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)):
        sys.exit(f"llama.cpp's quantiser failed with code {code} on {source}")


if __name__ == "__main__":
    main()
