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
from benchmarks.recording import Recorder
from benchmarks.workloads import Request


class Reader(LlamaCpp):
    def logprobs(self, text: list[int]) -> Iterator[float]:
        """Of all tokens but the first."""
        context = self._context(Recorder([Request(text, 1)]))
        batch = self._lib.llama_batch_init(len(text), 0, 1)
        try:
            self._fill(batch, [(0, position, token) for position, token in enumerate(text)])
            for row in range(len(text)):
                batch.logits[row] = 1
            self._decode(context, batch)
            for row, token in enumerate(text[1:]):
                logits = self._logits(context, row).astype(np.float64)
                yield float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        finally:
            self._lib.llama_batch_free(batch)
            self._lib.llama_free(context)


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
