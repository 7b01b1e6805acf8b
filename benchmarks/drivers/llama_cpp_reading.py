"""llama.cpp's results for given strings and tokens: the counterpart of benchmarks/llama_cpp_agreement.py.

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
        return np.array([each.copy() for each in self.each_logits(text)])


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
