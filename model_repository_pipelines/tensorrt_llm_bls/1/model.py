"""preprocessing → tensorrt_llm → postprocessing by calls from Python, as TensorRT-LLM's `tensorrt_llm_bls` model.

What it does beyond the ensemble: the text of a stream is that of all tokens so far, so that a piece never ends in half
a character; and a cancelled request ends in the engine, too.
"""

import json
import uuid

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
TO_PREPROCESSING = {
    "text_input": "QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "decoder_text_input": "DECODER_QUERY",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
}
TO_LLM = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "seed": "seed",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    **{
        name: name
        for name in (
            "beam_width",
            "presence_penalty",
            "frequency_penalty",
            "return_log_probs",
            "return_context_logits",
            "return_generation_logits",
            "return_perf_metrics",
            "return_num_input_tokens",
            "return_num_output_tokens",
            "prompt_embedding_table",
            "prompt_vocab_size",
            "lora_task_id",
            "lora_weights",
            "lora_config",
            "guided_decoding_guide_type",
            "guided_decoding_guide",
        )
    },
}
NOT_SERVED = ("image_input", "image_bytes_input", "image_url_input", "video_bytes_input", "num_draft_tokens")
"""Inputs of TensorRT-LLM's model that are refused here. The core model refuses the unsupported ones among its own."""
INCOMPLETE = "\ufffd"


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.llm = parameters["tensorrt_llm_model_name"]["string_value"]

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.answer(request, sender)
                sender.send(flags=FINAL)
            except Exception as error:
                failure = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
                sender.send(failure, flags=FINAL)

    def answer(self, request, sender):
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if inputs["text_input"].shape[0] != 1:
            raise ValueError("one prompt per request, please")
        for name in NOT_SERVED:
            if name in inputs and any(inputs[name].ravel().tolist()):
                raise ValueError(f"input '{name}' is not supported by this pipeline")
        prepared = call("preprocessing", renamed(inputs, TO_PREPROCESSING))
        llm_inputs = renamed({**inputs, **prepared}, TO_LLM)
        llm_inputs["exclude_input_in_output"] = inputs.get("exclude_input_in_output", np.array([[True]]))
        tokens, shown, request_id = [], "", str(uuid.uuid4())
        for outputs in stream(self.llm, llm_inputs, request_id):
            if sender.is_cancelled():
                stop(self.llm, request_id)
                return
            length = outputs["sequence_length"][0, 0]
            tokens.extend(outputs.pop("output_ids")[0, 0, :length].tolist())
            text = decoded(tokens)
            complete = text.rstrip(INCOMPLETE) if text.endswith(INCOMPLETE) else text
            send(sender, complete[len(shown) :], outputs)
            shown = complete
        rest = decoded(tokens)[len(shown) :]
        if rest:
            send(sender, rest, {})


def send(sender, text, outputs):
    tensors = [pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))]
    tensors += [pb_utils.Tensor(name, outputs[name]) for name in PASSED_ON if name in outputs]
    sender.send(pb_utils.InferenceResponse(output_tensors=tensors))


def decoded(tokens):
    batch = {
        "TOKENS_BATCH": np.array([[tokens]], np.int32),
        "SEQUENCE_LENGTH": np.array([[len(tokens)]], np.int32),
    }
    return call("postprocessing", batch)["OUTPUT"].ravel()[0].decode()


def renamed(inputs, names):
    return {new: inputs[old] for old, new in names.items() if old in inputs}


def call(model, inputs):
    return read(inference_request(model, inputs).exec())


def stream(model, inputs, request_id):
    for response in inference_request(model, inputs, request_id).exec(decoupled=True):
        if response.has_error() or response.output_tensors():
            yield read(response)


def stop(model, request_id):
    inputs = {
        "input_ids": np.zeros((1, 1), np.int32),
        "input_lengths": np.zeros((1, 1), np.int32),
        "request_output_len": np.zeros((1, 1), np.int32),
        "stop": np.array([[True]]),
    }
    list(inference_request(model, inputs, request_id).exec(decoupled=True))


def inference_request(model, inputs, request_id=""):
    tensors = [pb_utils.Tensor(name, np.ascontiguousarray(value)) for name, value in inputs.items()]
    return pb_utils.InferenceRequest(
        model_name=model, inputs=tensors, request_id=request_id, requested_output_names=OUTPUTS.get(model, LLM_OUTPUTS)
    )


OUTPUTS = {
    "preprocessing": [name for name in TO_LLM if name.isupper()],
    "postprocessing": ["OUTPUT"],
}
PASSED_ON = [
    "cum_log_probs",
    "output_log_probs",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
    "num_input_tokens",
    "num_output_tokens",
]
LLM_OUTPUTS = ["output_ids", "sequence_length", *PASSED_ON]


def read(response):
    if response.has_error():
        raise RuntimeError(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
