"""Text to token ids, as in TensorRT-LLM's `preprocessing` model."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = {
            name: value["string_value"] for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        directory = Path(args["model_repository"]) / parameters["tokenizer_dir"]
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.adds_special_tokens = parameters.get("add_special_tokens", "true") == "true"
        config = json.loads((directory / "config.json").read_text())
        self.end_id = config["eos_token_id"] if isinstance(config["eos_token_id"], int) else config["eos_token_id"][0]
        self.pad_id = config.get("pad_token_id") or self.end_id

    def execute(self, requests):
        return [self.preprocessed(request) for request in requests]

    def preprocessed(self, request):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        for name in ("DECODER_QUERY", "PROMPT_TABLE_EXTRA_ID"):
            if any(inputs.get(name, np.empty(0)).ravel().tolist()):
                raise pb_utils.TritonModelException(f"{name} is not supported: the model is a decoder of text")
        texts = [row[0].decode() for row in inputs["QUERY"]]
        prompts = [self.tokenizer.encode(text, add_special_tokens=self.adds_special_tokens).ids for text in texts]
        longest = max(map(len, prompts))
        padded = [ids + [self.pad_id] * (longest - len(ids)) for ids in prompts]
        outputs = {
            "INPUT_ID": padded,
            "REQUEST_INPUT_LEN": [[len(ids)] for ids in prompts],
            "BAD_WORDS_IDS": self.word_lists(inputs.get("BAD_WORDS_DICT"), len(texts)),
            "STOP_WORDS_IDS": self.word_lists(inputs.get("STOP_WORDS_DICT"), len(texts)),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": inputs.get("END_ID", [[self.end_id]] * len(texts)),
            "OUT_PAD_ID": inputs.get("PAD_ID", [[self.pad_id]] * len(texts)),
            "DECODER_INPUT_ID": [[self.pad_id]] * len(texts),
            "REQUEST_DECODER_INPUT_LEN": [[1]] * len(texts),
        }
        tensors = [pb_utils.Tensor(name, np.array(values, np.int32)) for name, values in outputs.items()]
        tensors.append(pb_utils.Tensor("EMBEDDING_BIAS", self.embedding_bias(inputs, len(texts))))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def embedding_bias(self, inputs, batch_size):
        """The value added to the logit of each token of the vocabulary; empty if no words are given."""
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None or weights is None:
            return np.empty((batch_size, 0), np.float32)
        if words.shape != weights.shape:
            shapes = f"{list(words.shape)} and {list(weights.shape)}"
            raise pb_utils.TritonModelException(f"embedding_bias_words and embedding_bias_weights differ: {shapes}")
        bias = np.zeros((batch_size, self.tokenizer.get_vocab_size()), np.float32)
        for index, (row, row_weights) in enumerate(zip(words, weights, strict=True)):
            for word, weight in zip(row, row_weights, strict=True):
                for token_id in self.tokenizer.encode(word.decode(), add_special_tokens=False).ids:
                    bias[index, token_id] += weight
        return bias

    def word_lists(self, words, batch_size):
        """For each prompt two rows: the ids of all words one after the other, and where each word ends (then -1)."""
        if words is None:
            return np.empty((batch_size, 2, 0), np.int32)
        rows = []
        for row in words:
            lists = [self.tokenizer.encode(word.decode(), add_special_tokens=False).ids for word in row if word]
            rows.append(([token_id for ids in lists for token_id in ids], np.cumsum([len(ids) for ids in lists])))
        width = max([1, *(len(ids) for ids, _ in rows)])
        lists = np.full((batch_size, 2, width), -1, np.int32)
        for index, (ids, ends) in enumerate(rows):
            lists[index, 0] = 0
            lists[index, 0, : len(ids)] = ids
            lists[index, 1, : len(ends)] = ends
        return lists
