"""llama.cpp's perplexity of given tokens, by its logits: the counterpart of benchmarks/perplexity.py.

    python -m benchmarks.drivers.llama_cpp_perplexity FILE.gguf … < TEXTS.json

The texts are lists of tokens, each read by itself. Prints the perplexities by the files' names, as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.drivers.llama_cpp_batching import LlamaCpp, add_options


class Reader(LlamaCpp):
    def logprobs(self, text: list[int]) -> Iterator[float]:
        """Of all tokens but the first."""
        for token, own in zip(text[1:], self.each_logits(text), strict=False):
            logits = own.astype(np.float64)
            yield float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    add_options(parser)
    arguments = parser.parse_args()
    texts = json.load(sys.stdin)
    found: dict[str, float] = {}
    for file in arguments.files:
        reader = Reader(argparse.Namespace(**vars(arguments), model=file))
        logprobs = [logprob for text in texts for logprob in reader.logprobs(text)]
        found[Path(file).name] = math.exp(-sum(logprobs) / len(logprobs))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
