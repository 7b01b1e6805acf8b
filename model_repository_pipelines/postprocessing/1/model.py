"""Token ids to text, as in TensorRT-LLM's `postprocessing` model."""

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
        self.skips_special_tokens = parameters.get("skip_special_tokens", "true") == "true"

    def execute(self, requests):
        return [self.postprocessed(request) for request in requests]

    def postprocessed(self, request):
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        texts = [
            self.tokenizer.decode(beam[:length].tolist(), skip_special_tokens=self.skips_special_tokens).encode()
            for beams, beam_lengths in zip(tokens, lengths, strict=True)
            for beam, length in zip(beams, beam_lengths, strict=True)
        ]
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))])
