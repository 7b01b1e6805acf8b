"""What llama.cpp makes of given strings and tokens: the counterpart of benchmarks/llama_cpp_agreement.py.

    python -m benchmarks.drivers.llama_cpp_reading FILE.gguf LOGITS.npy < QUESTIONS.json

The questions are an object of `strings` and of `texts`, lists of tokens of which each is read by itself. Prints the
tokens of the strings as JSON, special ones recognised and none added; writes the logits of all tokens of the texts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from typing import Any

import numpy as np

from benchmarks.drivers.llama_cpp_batching import LlamaCpp, add_options
from benchmarks.recording import Recorder
from benchmarks.workloads import Request


class Reader(LlamaCpp):
    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        found = (ctypes.c_int32 * room)()
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        count = self._lib.llama_tokenize(vocabulary, data, len(data), found, room, False, True)
        if count < 0:
            raise RuntimeError(f"llama.cpp made more than {room} tokens of {len(data)} bytes")
        return list(found[:count])

    def logits(self, text: list[int]) -> Any:
        """float32 [tokens, vocab]"""
        context = self._context(Recorder([Request(text, 1)]))
        batch = self._lib.llama_batch_init(len(text), 0, 1)
        try:
            self._fill(batch, [(0, position, token) for position, token in enumerate(text)])
            for row in range(len(text)):
                batch.logits[row] = 1
            self._decode(context, batch)
            return np.array([self._logits(context, row) for row in range(len(text))])
        finally:
            self._lib.llama_batch_free(batch)
            self._lib.llama_free(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("logits")
    add_options(parser)
    arguments = parser.parse_args()
    questions = json.load(sys.stdin)
    reader = Reader(arguments)
    np.save(arguments.logits, np.concatenate([reader.logits(text) for text in questions["texts"]]))
    print(json.dumps([reader.tokens(text) for text in questions["strings"]]))


if __name__ == "__main__":
    main()
