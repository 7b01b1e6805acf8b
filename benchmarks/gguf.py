"""Converts a checkpoint for llama.cpp: with its own converter, and the kind of tokenizer that it cannot guess.

    python -m benchmarks.gguf LLAMA_CPP_SOURCE EXTRA_PACKAGES CHECKPOINT FILE.gguf f16|bf16|f32|q8_0

Runs with our torch and transformers; EXTRA_PACKAGES is a site-packages folder with the converter's other imports.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source, extra_packages, checkpoint, target, kind = sys.argv[1:]
    sys.path.append(extra_packages)
    sys.path[:0] = [source, f"{source}/gguf-py"]
    import conversion.base

    for value in vars(conversion.base).values():
        if isinstance(value, type) and hasattr(value, "get_vocab_base_pre"):
            value.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", target, "--outtype", kind]
    if "Qwen3_5" in Path(checkpoint, "config.json").read_text():  # the converter expects its further layers otherwise
        sys.argv.append("--no-mtp")
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
