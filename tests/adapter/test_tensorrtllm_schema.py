"""TensorRT-LLM's tensors: in its users' form and in that of its core model, read one by one and through the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.schemas import schema_for
from llmbackend.adapter.schemas import tensorrtllm_tensors as tables
from llmbackend.adapter.schemas.schema import LlmInputs
from llmbackend.adapter.schemas.tensorrtllm import TensorRtLlmSchema
from llmbackend.adapter.schemas.vllm import VllmSchema
from llmbackend.adapter.text.token_bias import TokenBias
from llmbackend.adapter.text.tokenizer import ByteTokenizer
from llmbackend.core.backend_api import ErrorCode, Tenant, Tensor, TritonError
from llmbackend.engine.messages import BANNED_BIAS
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.repeating_text import repeat_text
from tests.helpers.waiting import eventually

SCHEMA = 'parameters {{ key: "tensor_schema" value {{ string_value: "{}" }} }}'
USER = SCHEMA.format("tensorrtllm")
CORE = SCHEMA.format("tensorrtllm_core")
BATCH = "max_batch_size: 4\n"
FREE: dict[str, Any] = {"end_id": [[-1]], "request_output_len": [[12]]}


def config_of(pbtxt: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(pbtxt, ModelConfig())
    return schema_for(config).complete(config)


def read(pbtxt: str, outputs: list[str] | None = None, **inputs: Any) -> list[LlmInputs]:
    config = config_of(pbtxt)
    types = {tensor.name: tensor for tensor in config.input}
    tensors = {name: tensor_of(name, value, types[name].data_type) for name, value in inputs.items()}
    wanted = outputs or [tensor.name for tensor in config.output]
    request: Any = SimpleNamespace(inputs=tensors, requested_outputs=wanted)
    return list(schema_for(config).read(request))


def tensor_of(name: str, value: Any, data_type: int = 0) -> Tensor:
    kinds = {1: np.bool_, 5: np.uint64, 8: np.int32, 11: np.float32, 10: np.float16, 2: np.uint8, 13: np.object_}
    array = np.array(value, kinds.get(data_type))
    if array.dtype == np.object_:
        array = np.array([text.encode() for text in array.ravel()], np.object_).reshape(array.shape)
    return Tensor.of(name, array)


def ids_of(inputs: LlmInputs) -> list[int]:
    assert inputs.input_ids is not None
    return list(inputs.input_ids.tolist())


def refusal(pbtxt: str, **inputs: Any) -> TritonError:
    with pytest.raises(TritonError) as caught:
        read(pbtxt, **inputs)
    return caught.value


# --- which schema -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pbtxt", "schema", "needs_tokenizer"),
    [
        ('backend: "llm"', VllmSchema, True),
        ('backend: "vllm"', VllmSchema, True),
        (f'backend: "llm" {USER}', TensorRtLlmSchema, True),
        (f'backend: "llm" {CORE}', TensorRtLlmSchema, False),
        ('backend: "tensorrtllm"', TensorRtLlmSchema, False),
        ('backend: "tensorrtllm" input { name: "text_input" data_type: TYPE_STRING dims: 1 }', TensorRtLlmSchema, True),
        (
            f'backend: "llm" {USER} input {{ name: "request_output_len" data_type: TYPE_INT32 dims: 1 }}',
            TensorRtLlmSchema,
            False,
        ),
    ],
)
def test_the_configuration_chooses_the_schema(pbtxt: str, schema: type, needs_tokenizer: bool) -> None:
    chosen = schema_for(text_format.Parse(pbtxt, ModelConfig()))
    assert type(chosen) is schema
    assert chosen.needs_tokenizer is needs_tokenizer


def test_an_unknown_schema_is_refused_with_those_that_exist() -> None:
    with pytest.raises(TritonError, match="'tensor_schema' is 'openai', expected one of: vllm, tensorrtllm"):
        schema_for(text_format.Parse(SCHEMA.format("openai"), ModelConfig()))


def test_auto_complete_declares_every_tensor_and_keeps_the_batch_size() -> None:
    config = config_of(BATCH + USER)
    assert {tensor.name for tensor in config.input} == set(tables.USER_INPUTS)
    assert {tensor.name for tensor in config.output} == set(tables.USER_OUTPUTS)
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (4, True)


def test_tensorrtllms_own_declarations_fit() -> None:
    declared = """
      input [
        { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true optional: true },
        { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } },
        { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } },
        { name: "stop_words_list" data_type: TYPE_INT32 dims: [ 2, -1 ] optional: true allow_ragged_batch: true },
        { name: "prompt_embedding_table" data_type: TYPE_BF16 dims: [ -1, -1 ] optional: true }
      ]
      output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
    """
    config = config_of(f'backend: "tensorrtllm" {BATCH} {declared}')
    assert not next(tensor for tensor in config.input if tensor.name == "input_lengths").optional
    with pytest.raises(TritonError, match=r"input 'seed' is TYPE_INT32\[1\], expected TYPE_UINT64\[1\]"):
        config_of('backend: "tensorrtllm" input { name: "seed" data_type: TYPE_INT32 dims: 1 }')


# --- reading ----------------------------------------------------------------------------------------------------------


def test_sampling_has_tensorrtllms_defaults_and_not_vllms() -> None:
    (inputs,) = read(BATCH + USER, text_input=[["a"]], max_tokens=[[5]])
    assert inputs.text_input == "a"
    assert inputs.sampling["temperature"] == 0.0  # neither top_k nor top_p: greedy
    assert (inputs.sampling["seed"], inputs.sampling["max_tokens"]) == (0, 5)
    assert "ignore_eos" not in inputs.sampling
    (core,) = read(BATCH + CORE, input_ids=[[1, 2]], request_output_len=[[5]])
    assert (core.sampling["ignore_eos"], core.sampling["stop_token_ids"]) == (True, [])


def test_sampling_inputs_are_read_under_their_names() -> None:
    (inputs,) = read(
        BATCH + USER,
        text_input=[["a"]],
        max_tokens=[[5]],
        min_tokens=[[2]],
        top_k=[[3]],
        temperature=[[0.5]],
        repetition_penalty=[[1.5]],
        presence_penalty=[[0.25]],
        frequency_penalty=[[0.75]],
        seed=[[7]],
        end_id=[[2]],
        pad_id=[[0]],
        stop_words=[["x", "", "yz"]],
        bad_words=[[""]],
        length_penalty=[[1.0]],
    )
    expected = {
        "max_tokens": 5,
        "min_tokens": 2,
        "top_k": 3,
        "top_p": 1.0,
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "seed": 7,
        "ignore_eos": True,
        "stop_token_ids": [2],
        "stop": ["x", "yz"],
        "include_stop_str_in_output": True,
    }
    assert inputs.sampling == expected


def test_top_p_alone_and_zero_as_not_given() -> None:
    (inputs,) = read(USER, text_input=["a"], max_tokens=[5], top_p=[0.5], top_k=[0], temperature=[0.75])
    assert (inputs.sampling["top_k"], inputs.sampling["top_p"], inputs.sampling["temperature"]) == (0, 0.5, 0.75)
    (greedy,) = read(USER, text_input=["a"], max_tokens=[5], top_p=[0.0], temperature=[0.75])
    assert greedy.sampling["temperature"] == 0.0


def test_a_batch_is_one_generation_per_prompt_without_the_padding() -> None:
    batch = read(
        BATCH + CORE,
        input_ids=[[1, 2, 3], [4, 5, 0]],
        input_lengths=[[3], [2]],
        request_output_len=[[5], [6]],
        stop_words_list=[[[9, 8, 7], [1, 3, -1]], [[0, 0, 0], [-1, -1, -1]]],
        seed=[[1], [2]],
    )
    assert [ids_of(inputs) for inputs in batch] == [[1, 2, 3], [4, 5]]
    assert [inputs.sampling["max_tokens"] for inputs in batch] == [5, 6]
    assert [inputs.stop_sequences for inputs in batch] == [((9,), (8, 7)), ()]
    assert [inputs.batch_index for inputs in batch] == [0, 1]
    assert all("batch_index" in inputs.options.outputs for inputs in batch)


def test_without_a_batch_dimension() -> None:
    (inputs,) = read(CORE, input_ids=[1, 2], input_lengths=[2], request_output_len=[3], stop_words_list=[[5], [1]])
    assert (ids_of(inputs), inputs.stop_sequences) == ([1, 2], ((5,),))
    assert "batch_index" not in inputs.options.outputs


def test_return_sequences_are_read_as_one_prompt() -> None:
    (inputs,) = read(BATCH + USER, text_input=[["a"]], max_tokens=[[5]], num_return_sequences=[[3]], seed=[[2**64 - 1]])
    assert (inputs.num_sequences, inputs.sampling["seed"]) == (3, 2**63 - 1)
    assert "sequence_index" in inputs.options.outputs


def test_bias_and_bad_words_are_read_in_both_forms() -> None:
    (core,) = read(
        CORE,
        input_ids=[1],
        request_output_len=[3],
        embedding_bias=[0.0, 2.5, 0.0, -1.0],
        bad_words_list=[[5, 6, 7], [1, 3, -1]],
    )
    assert (core.bias.by_id, core.bias.bad_ids) == ({1: 2.5, 3: -1.0}, ((5,), (6, 7)))
    (user,) = read(
        BATCH + USER,
        text_input=[["a"]],
        max_tokens=[[3]],
        bad_words=[["x", "", "y"]],
        embedding_bias_words=[["u", "v"]],
        embedding_bias_weights=[[1.5, -200.0]],
    )
    assert (list(user.bias.bad_words), list(user.bias.by_word)) == (["x", "y"], [("u", 1.5), ("v", -200.0)])


def test_what_a_bias_comes_to_is_checked_against_the_vocabulary() -> None:
    text = ByteTokenizer()
    bias = TokenBias(by_id={65: 1.0, 66: 2.0}, by_word=[("AA", 3.0), ("B", 1.0)], bad_words=["C"], bad_ids=[(68,)])
    assert bias.resolve(text, 300) == ({65: 7.0, 66: 3.0, 67: BANNED_BIAS, 68: BANNED_BIAS}, ())
    assert TokenBias(bad_words=["no"], bad_ids=[(1, 2, 3)]).resolve(text, 300) == ({}, ((110, 111), (1, 2, 3)))
    for wrong, told in (
        (TokenBias(bad_ids=[(1, 2, 300)]), "names token 300, expected token ids from 0 to 299"),
        (TokenBias(by_id={300: 1.0}), "names token 300, expected token ids from 0 to 299"),
        (TokenBias(by_word=[("A", float("nan"))]), "the bias of token 65 is nan, expected a finite number"),
        (TokenBias(bad_words=["x" * 1025]), "'bad_words'[0] has 1025 characters, expected at most 1024"),
    ):
        with pytest.raises(TritonError, match=re.escape(told)):
            wrong.resolve(text, 300)


@pytest.mark.parametrize(
    ("pbtxt", "given", "in_stream", "prepends"),
    [
        (USER, None, False, True),
        (USER, True, False, False),
        (USER, None, True, False),
        (USER, False, True, False),
        (USER + 'parameters { key: "exclude_input_in_output" value { string_value: "true" } }', None, False, False),
        (USER + 'parameters { key: "exclude_input_in_output" value { string_value: "true" } }', False, False, True),
    ],
)
def test_when_the_prompt_stands_before_the_output(
    pbtxt: str, given: bool | None, in_stream: bool, prepends: bool
) -> None:
    flags: dict[str, Any] = {"stream": [in_stream]} | ({} if given is None else {"exclude_input_in_output": [given]})
    (inputs,) = read(pbtxt, text_input=["a"], max_tokens=[5], **flags)
    assert inputs.options.prepend_prompt is prepends


NOTHING: dict[str, Any] = {
    "bad_words": [[""]],
    "embedding_bias_words": [[""]],
    "embedding_bias_weights": [[0.0]],
    "return_context_logits": [[False]],
    "prompt_vocab_size": [[0]],
    "num_draft_tokens": [[0]],
    "prompt_embedding_table": np.zeros((1, 0, 0)),
}


def test_an_input_that_asks_for_nothing_is_accepted() -> None:
    assert len(read(BATCH + USER, text_input=[["a"]], max_tokens=[[5]], **NOTHING)) == 1
    core: dict[str, Any] = {"input_ids": [[1]], "request_output_len": [[1]]}
    empty: dict[str, Any] = {
        "bad_words_list": np.zeros((1, 2, 0)),
        "decoder_input_ids": [[0]],
        "decoder_input_lengths": [[1]],
    }
    assert len(read(BATCH + CORE, **core, **empty)) == 1
    assert len(read(BATCH + CORE, **core, bad_words_list=[[[0], [-1]]])) == 1


@pytest.mark.parametrize("form", ["user", "core"])
@pytest.mark.parametrize(
    ("kind", "guide", "expected"),
    [
        ("json", "", ("json", True)),
        ("json_schema", '{"type": "null"}', ("json", '{"type": "null"}')),
        ("regex", "a+", ("regex", "a+")),
        ("ebnf_grammar", 'root ::= "a"', ("grammar", 'root ::= "a"')),
        ("", "", None),
    ],
)
def test_a_guide_becomes_a_constraint(form: str, kind: str, guide: str, expected: tuple[str, object] | None) -> None:
    guides: dict[str, Any] = {"guided_decoding_guide_type": [[kind]], "guided_decoding_guide": [[guide]]}
    if form == "user":
        (inputs,) = read(BATCH + USER, text_input=[["a"]], max_tokens=[[5]], **guides)
    else:
        (inputs,) = read(BATCH + CORE, input_ids=[[1, 2]], request_output_len=[[5]], **guides)
    constraint = inputs.sampling.get("structured_outputs")
    assert (constraint and (constraint.kind, constraint.value)) == expected


@pytest.mark.parametrize(("kind", "guide"), [("yaml", "x"), ("", "x"), ("regex", "")])
def test_a_guide_of_an_unknown_type_or_without_text_is_refused(kind: str, guide: str) -> None:
    guides: dict[str, Any] = {"guided_decoding_guide_type": [[kind]], "guided_decoding_guide": [[guide]]}
    error = refusal(BATCH + USER, text_input=[["a"]], max_tokens=[[5]], **guides)
    assert error.code is ErrorCode.INVALID_ARG
    assert "'guided_decoding_guide_type'" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_context_logits", [[True]]),
        ("return_generation_logits", [[True]]),
        ("prompt_embedding_table", [[[1.0]]]),
        ("num_draft_tokens", [[3]]),
        ("lora_task_id", [[1]]),
        ("image_url_input", [["http://x"]]),
        ("decoder_text_input", [["x"]]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, value: Any) -> None:
    error = refusal(BATCH + USER, text_input=[["a"]], max_tokens=[[5]], **{name: value})
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.message == f"input '{name}' is not supported by this backend"


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"beam_width": [[2]]}, "'beam_width' is 2, only 1 is supported by this backend"),
        ({"draft_input_ids": [[3]]}, "input 'draft_input_ids' is not supported"),
        ({"bad_words_list": [[[5], [2]]]}, "Invalid format for word list: 'bad_words_list' has offset 2"),
        ({"runtime_top_p_decay": [[0.5]]}, "input 'runtime_top_p_decay' is not supported"),
        ({"input_lengths": [[9]]}, "'input_lengths' is 9, but 'input_ids' holds 2 token ids"),
        ({"runtime_top_k": [[1, 2]]}, "Expected a scalar tensor for tensor runtime_top_k"),
        ({"seed": [[1], [2]]}, "Expected batch size doesn't match batch size for tensor seed. Expected 1 got 2"),
        ({"stop_words_list": [[[1, 2], [2, 1]]]}, "Invalid format for word list: 'stop_words_list' has offset 1"),
        ({"stop_words_list": [[[1, 2], [3, -1]]]}, "Invalid format for word list: 'stop_words_list' has offset 3"),
        ({"num_return_sequences": [[0]]}, "'num_return_sequences' is 0, expected 1 to 128"),
        (
            {"stop_words_list": [[[1] * 257, [*range(1, 258)]]]},
            "'stop_words_list' has 257 words, expected at most 256",
        ),
        (
            {"stop_words_list": [[[1] * 2000, [1025] + [-1] * 1999]]},
            "'stop_words_list'[0] has 1025 tokens, expected at most 1024",
        ),
        ({"stop_words_list": [[[0] * 16385] * 2]}, "'stop_words_list' has 16385 columns, expected at most 16384"),
        ({"embedding_bias": [[1.0] * 1025]}, "'embedding_bias' has 1025 biases that are not 0, expected at most 1024"),
    ],
)
def test_a_bad_core_input_is_named(inputs: dict[str, Any], told: str) -> None:
    assert told in refusal(BATCH + CORE, **{"input_ids": [[1, 2]], "request_output_len": [[3]], **inputs}).message


def test_stop_words_are_bounded_before_any_is_read() -> None:
    inputs = {"text_input": [["a"]], "max_tokens": [[3]], "stop_words": [["x"] * 257]}
    assert "'stop_words' has 257 elements, expected at most 256" in refusal(BATCH + USER, **inputs).message


def test_what_must_be_given() -> None:
    assert refusal(BATCH + CORE, input_ids=[[1]]).message == "A value is required for request_output_len"
    assert refusal(BATCH + USER, max_tokens=[[1]]).message == "A value is required for text_input"


def test_without_decoupled_responses_there_is_one_prompt_and_no_stream() -> None:
    fixed = BATCH + CORE + "model_transaction_policy { decoupled: false }"
    core: dict[str, Any] = {"input_ids": [[1]], "request_output_len": [[3]]}
    assert "Streaming is only supported in decoupled mode." in refusal(fixed, **core, streaming=[[True]]).message
    two = {"input_ids": [[1], [2]], "request_output_len": [[3], [3]]}
    assert "a batch of 2 gives 2 responses" in refusal(fixed, **two).message
    assert read(fixed, **core, num_return_sequences=[[2]])[0].num_sequences == 2, "as theirs: two responses"
    words = {"text_input": [["a"]], "max_tokens": [[3]], "embedding_bias_words": [["x", "y"]]}
    told = "'embedding_bias_words' has 2 elements and 'embedding_bias_weights' 1, expected the same number"
    assert refusal(BATCH + USER, **words, embedding_bias_weights=[[1.0]]).message == told


def test_every_input_is_read_refused_or_known_to_change_nothing() -> None:
    """No tensor is declared and then ignored in silence: parameters of beams, padding and cache hints change nothing
    that a client can see here."""
    source = (Path(tables.__file__).parent / "tensorrtllm.py").read_text()
    flags = ("return_log_probs", "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics")
    without_effect = {
        "beam_search_diversity_rate",
        "decoder_input_lengths",
        "early_stopping",
        "len_penalty",
        "length_penalty",
        "pad_id",
        "retention_decode_duration_ms",
        "retention_decode_priority",
        "retention_token_range_durations_ms",
        "retention_token_range_ends",
        "retention_token_range_priorities",
        "retention_token_range_starts",
    }
    for name in {**tables.USER_INPUTS, **tables.CORE_INPUTS}:
        bare = name.removeprefix("runtime_")
        is_read = f'"{name}"' in source or f'{{prefix}}{bare}"' in source or name in flags
        assert is_read or name in tables.REFUSED_INPUTS | without_effect, name


# --- through the host -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("core"), BATCH + CORE) as one:
        yield one


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("user"), BATCH + USER) as one:
        yield one


def tensors(host: LlmHost, **inputs: Any) -> tuple[Tensor, ...]:
    config = host.server.model_config("mock_llm")
    types = {tensor.name: tensor.data_type for tensor in config.input}
    return tuple(tensor_of(name, value, types[name]) for name, value in inputs.items())


def infer(host: LlmHost, request_id: str = "", **inputs: Any) -> Call:
    return start(host, request_id, **inputs).wait()


def start(host: LlmHost, request_id: str = "", **inputs: Any) -> Call:
    return host.start_tensors(tensors(host, **inputs), request_id=request_id)


def outputs_of(call: Call, name: str) -> list[np.ndarray[Any, Any]]:
    return [tensor.data for response in call.responses for tensor in response.outputs if tensor.name == name]


def test_the_core_form_gives_ids_with_a_batch_and_a_beam_dimension(core: LlmHost) -> None:
    call = infer(core, input_ids=[[65, 66]], input_lengths=[[2]], exclude_input_in_output=[[True]], **FREE)
    assert call.output_names == [{"output_ids", "sequence_length"}]
    (ids,), (length,) = outputs_of(call, "output_ids"), outputs_of(call, "sequence_length")
    assert (ids.shape, length.shape, length.item()) == ((1, 1, 12), (1, 1), 12)
    with_prompt = infer(core, input_ids=[[65, 66]], input_lengths=[[2]], **FREE)
    assert outputs_of(with_prompt, "output_ids")[0][0, 0].tolist() == [65, 66, *ids[0, 0].tolist()]


def test_a_configuration_as_tensorrtllms_templates_make_it_is_served(tmp_path: Path) -> None:
    """With scalars reshaped to nothing, ragged batches and the dynamic batcher."""
    scalars = ("input_lengths", "request_output_len", "end_id", "runtime_top_k", "beam_width")
    declared = "".join(
        f"input {{ name: '{name}' data_type: TYPE_INT32 dims: [ 1 ] reshape: {{ shape: [ ] }} "
        f"optional: {str(name not in scalars[:2]).lower()} }}\n"
        for name in scalars
    )
    batcher = "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 1000 }"
    ids = "input { name: 'input_ids' data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true optional: true }"
    with llm_host(tmp_path, f"{BATCH}{CORE}\n{declared}\n{ids}\n{batcher}") as host:
        lengths: dict[str, Any] = {"input_lengths": [[2]], "exclude_input_in_output": [[True]], "beam_width": [[1]]}
        calls = [start(host, input_ids=[[65, 66, index]], **lengths, **FREE) for index in range(6)]
        answers = [outputs_of(call.wait(), "output_ids")[0].tolist() for call in calls]
        assert answers[0][0] and answers.count(answers[0]) == 6  # input_lengths cuts what differs
        with pytest.raises(TritonError, match=r"missing required input\(s\) \['request_output_len'\]"):
            start(host, input_ids=[[65]], input_lengths=[[1]], end_id=[[-1]])


def test_a_core_stream_gives_the_new_ids_of_each_step(core: LlmHost) -> None:
    whole = infer(core, input_ids=[[65, 66]], exclude_input_in_output=[[True]], **FREE)
    call = infer(core, input_ids=[[65, 66]], streaming=[[True]], return_log_probs=[[True]], **FREE)
    pieces = outputs_of(call, "output_ids")
    assert len(pieces) > 2
    assert np.concatenate(pieces, axis=2).tolist() == outputs_of(whole, "output_ids")[0].tolist()
    log_probs = np.concatenate(outputs_of(call, "output_log_probs"), axis=2)
    assert log_probs.shape == (1, 1, 12)
    assert outputs_of(call, "cum_log_probs")[-1].item() == pytest.approx(log_probs.sum(), rel=1e-5)
    assert call.num_finals == 1


def test_the_end_id_ends_a_generation_and_is_no_output(core: LlmHost) -> None:
    free = outputs_of(infer(core, input_ids=[[65]], exclude_input_in_output=[[True]], **FREE), "output_ids")[0][0, 0]
    end = int(free[5])
    first = free.tolist().index(end)
    call = infer(core, input_ids=[[65]], request_output_len=[[12]], end_id=[[end]], exclude_input_in_output=[[True]])
    assert outputs_of(call, "output_ids")[0][0, 0].tolist() == free[:first].tolist()


def test_the_end_id_has_no_text_and_stop_words_have_theirs(user: LlmHost) -> None:
    ask: dict[str, Any] = {"text_input": [["a"]], "max_tokens": [[12]], "exclude_input_in_output": [[True]]}
    free = infer(user, **ask, end_id=[[-1]]).text
    end = next(character for character in free if character.isascii())
    before = free[: free.index(end)]
    assert infer(user, **ask, end_id=[[ord(end)]]).text == before
    assert infer(user, **ask, end_id=[[-1]], stop_words=[[end]]).text == before + end


def test_a_stop_word_of_several_tokens_ends_a_generation_and_stays(core: LlmHost) -> None:
    free = outputs_of(infer(core, input_ids=[[65]], exclude_input_in_output=[[True]], **FREE), "output_ids")[0][0, 0]
    word = free[4:6].tolist()
    call = infer(core, input_ids=[[65]], stop_words_list=[[word, [2, -1]]], exclude_input_in_output=[[True]], **FREE)
    got = outputs_of(call, "output_ids")[0][0, 0].tolist()
    assert got[-2:] == word
    assert got == free[: len(got)].tolist()


def test_a_batch_is_answered_prompt_by_prompt_with_one_final(core: LlmHost) -> None:
    call = infer(
        core,
        input_ids=[[65, 66, 67], [68, 0, 0]],
        input_lengths=[[3], [1]],
        request_output_len=[[6], [9]],
        end_id=[[-1], [-1]],
        exclude_input_in_output=[[True], [True]],
    )
    by_index = dict(
        zip([int(one.item()) for one in outputs_of(call, "batch_index")], outputs_of(call, "output_ids"), strict=True)
    )
    assert {index: ids.shape for index, ids in by_index.items()} == {0: (1, 1, 6), 1: (1, 1, 9)}
    alone = infer(core, input_ids=[[68]], request_output_len=[[9]], end_id=[[-1]], exclude_input_in_output=[[True]])
    assert by_index[1].tolist() == outputs_of(alone, "output_ids")[0].tolist()
    assert (len(call.responses), call.num_finals) == (2, 1)


def test_return_sequences_draw_with_seeds_of_their_own(core: LlmHost) -> None:
    ask: dict[str, Any] = {"input_ids": [[65]], "runtime_top_k": [[50]], **FREE}
    call = infer(core, seed=[[5]], num_return_sequences=[[3]], **ask)
    indices = [value.item() for value in outputs_of(call, "sequence_index")]
    several = dict(zip(indices, [ids.tolist() for ids in outputs_of(call, "output_ids")], strict=True))
    single = [outputs_of(infer(core, seed=[[5 + index]], **ask), "output_ids")[0].tolist() for index in range(3)]
    assert several == dict(enumerate(single))


def test_a_bad_prompt_in_a_batch_refuses_the_request(core: LlmHost) -> None:
    call = infer(core, input_ids=[[65], [999]], request_output_len=[[3], [3]])
    assert call.error is not None and "input 'input_ids' holds 999" in call.error.message
    assert call.num_finals == 1


def test_performance_numbers_come_with_every_response(core: LlmHost) -> None:
    prompt = [[*range(20, 40)]]
    ask: dict[str, Any] = {"input_ids": prompt, "streaming": [[True]], "return_perf_metrics": [[True]], **FREE}
    for reused in (0, 2):
        call = infer(core, **ask)
        assert all(one == {"output_ids", "sequence_length", *tables.PERF_OUTPUTS} for one in call.output_names)
        times = [
            [value.item() for value in outputs_of(call, name)] for name in tables.PERF_OUTPUTS if "time_ns" in name
        ]
        assert all([*at_once] == sorted(at_once) for at_once in zip(*times, strict=True))
        counts = [outputs_of(call, f"kv_cache_{name}_blocks") for name in ("alloc_new", "reused", "alloc_total")]
        assert all(value.shape == (1, 1) for values in counts for value in values)
        first, last = ([values[index].item() for values in counts] for index in (0, -1))
        assert first == [3 - reused, reused, 3] and last == [4 - reused, reused, 4], "blocks of 8 tokens"
        assert outputs_of(call, "total_draft_tokens")[-1].item() == 0


def test_drafts_are_counted_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_text(monkeypatch)
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    ask: dict[str, Any] = {"return_perf_metrics": [[True]], "request_output_len": [[40]], "end_id": [[-1]]}
    with llm_host(tmp_path, BATCH + CORE, speculative_config=speculation) as host:
        calls = [infer(host, input_ids=[[65, 66, first]], **ask) for first in range(70, 73)]
        drafts, accepted, rates = (
            [outputs_of(call, name)[-1].item() for call in calls]
            for name in ("total_draft_tokens", "total_accepted_draft_tokens", "acceptance_rate")
        )
        assert all(0 < accepted[i] < drafts[i] and rates[i] == pytest.approx(accepted[i] / drafts[i]) for i in range(3))
        eventually(lambda: host.metric("vllm:spec_decode_num_draft_tokens_total") == sum(drafts))
        assert host.metric("vllm:spec_decode_num_accepted_tokens_total") == sum(accepted)


def test_drafts_complete_no_bad_word(tmp_path: Path, core: LlmHost) -> None:
    ask: dict[str, Any] = {"input_ids": [[65, 66, 65, 66]], **FREE}
    free = outputs_of(infer(core, **ask), "output_ids")[0].ravel().tolist()
    ask["bad_words_list"] = [[free[4:6], [2, -1]]]
    expected = outputs_of(infer(core, **ask), "output_ids")[0]
    assert expected.ravel().tolist()[:5] == free[:5] and expected.ravel().tolist() != free
    with llm_host(tmp_path, BATCH + CORE, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as host:
        assert (outputs_of(infer(host, **ask), "output_ids")[0] == expected).all()


def test_a_banned_token_is_never_drawn_and_a_biased_one_is(user: LlmHost, core: LlmHost) -> None:
    ask: dict[str, Any] = {
        "text_input": [["ab"]],
        "max_tokens": [[40]],
        "end_id": [[-1]],
        "exclude_input_in_output": [[True]],
    }
    free = infer(user, **ask).text
    word = next(character for character in free if character.isascii())
    assert word not in infer(user, **ask, bad_words=[[word, ""]]).text
    pair = free[:2]
    apart = infer(user, **ask, bad_words=[[pair, "b" + free[0]]]).text  # the second one begins in the prompt
    assert pair not in apart and apart[0] != free[0]
    pushed = infer(user, **ask, embedding_bias_words=[["Q"]], embedding_bias_weights=[[500.0]]).text
    assert pushed == "Q" * 40
    banned = infer(user, **ask, embedding_bias_words=[["Q"]], embedding_bias_weights=[[500.0]], bad_words=[["Q"]]).text
    assert "Q" not in banned
    ids = infer(core, input_ids=[[65]], **FREE)
    token = int(outputs_of(ids, "output_ids")[0][0, 0, 1])
    without = infer(core, input_ids=[[65]], bad_words_list=[[[token], [1]]], **FREE)
    assert token not in outputs_of(without, "output_ids")[0][0, 0, 1:].tolist()


def test_a_model_that_is_not_decoupled_sends_one_response_for_each_sequence(tmp_path: Path) -> None:
    fixed = BATCH + CORE + "model_transaction_policy { decoupled: false }"
    with llm_host(tmp_path, fixed) as host:
        ask: dict[str, Any] = {"input_ids": [[65]], "runtime_top_k": [[50]], "num_return_sequences": [[3]], **FREE}
        call = infer(host, **ask)
        assert sorted(value.item() for value in outputs_of(call, "sequence_index")) == [0, 1, 2]
        assert (len(call.responses), call.num_finals) == (3, 1)
        statistics = host.server.model_statistics  # reported after the last response
        eventually(lambda: [one.batch_size for one in statistics("mock_llm")[0].batch_stats] == [1])


def test_stop_ends_the_requests_with_its_id_and_gives_what_they_have(tmp_path: Path) -> None:
    with llm_host(tmp_path, BATCH + CORE, mock_step_ms=5.0) as host:
        running = start(host, "me", input_ids=[[65]], streaming=[[True]], end_id=[[-1]], request_output_len=[[200]])
        other = start(host, "you", input_ids=[[65]], end_id=[[-1]], request_output_len=[[20]])
        assert running.first.wait(20)
        placeholder: dict[str, Any] = {"input_ids": [[0]], "input_lengths": [[0]], "request_output_len": [[0]]}
        stop = infer(host, "me", stop=[[True]], **placeholder)
        assert [response.outputs for response in stop.responses] == [()]
        assert running.wait().responses[-1].error is None
        assert 0 < sum(ids.shape[2] for ids in outputs_of(running, "output_ids")) < 200
        assert outputs_of(other.wait(), "output_ids")[0].shape == (1, 1, 21)
        anonymous = infer(host, stop=[[True]], **placeholder)
        assert anonymous.error is not None
        assert anonymous.error.message == "Trying to stop a request but request ID is not provided"


def test_stop_ends_its_clients_requests_alone(tmp_path: Path) -> None:
    alice, bob, operator = Tenant("alice"), Tenant("bob"), Tenant("root", is_operator=True)
    endless = {"streaming": [[True]], "end_id": [[-1]], "request_output_len": [[200]]}
    stop = {"stop": [[True]], "input_ids": [[0]], "input_lengths": [[0]], "request_output_len": [[0]]}
    with llm_host(tmp_path, BATCH + CORE, mock_step_ms=20.0) as host:
        calls = {
            tenant: host.start_tensors(tensors(host, input_ids=[[65]], **endless), "me", tenant=tenant)
            for tenant in (alice, bob)
        }
        assert all(call.first.wait(20) for call in calls.values())
        for by, ended in ((bob, bob), (operator, alice)):
            host.start_tensors(tensors(host, **stop), "me", tenant=by).wait()
            calls[ended].wait()
            assert by is operator or not calls[alice].num_finals
        for call in calls.values():
            assert 0 < sum(ids.shape[2] for ids in outputs_of(call, "output_ids")) < 200


def test_the_users_form_gives_text(user: LlmHost) -> None:
    call = infer(user, text_input=[["ab"]], max_tokens=[[9]], end_id=[[-1]])
    (text,) = outputs_of(call, "text_output")
    assert text.shape == (1,)
    assert call.text.startswith("ab")
    flags: dict[str, Any] = {
        "exclude_input_in_output": [[True]],
        "return_num_input_tokens": [[True]],
        "return_num_output_tokens": [[True]],
    }
    alone = infer(user, text_input=[["ab"]], max_tokens=[[9]], end_id=[[-1]], **flags)
    assert call.text == "ab" + alone.text
    assert outputs_of(alone, "num_input_tokens")[0].tolist() == [[2]]
    assert outputs_of(alone, "num_output_tokens")[0].tolist() == [[9]]


def test_a_users_stream_is_the_whole_and_a_stop_word_stays_in_the_text(user: LlmHost) -> None:
    free = infer(user, text_input=[["ab"]], max_tokens=[[40]], end_id=[[-1]], exclude_input_in_output=[[True]])
    word = next(char for char in free.text[5:] if char.isascii() and char.isprintable())
    call = infer(user, text_input=[["ab"]], max_tokens=[[40]], end_id=[[-1]], stop_words=[[word]], stream=[[True]])
    assert call.text == free.text[: free.text.index(word) + 1]
    assert call.num_finals == 1


def test_an_unsupported_request_does_not_affect_others(user: LlmHost) -> None:
    call = infer(user, text_input=[["ab"]], max_tokens=[[9]], beam_width=[[4]])
    assert call.error is not None and call.error.code is ErrorCode.UNSUPPORTED
    assert infer(user, text_input=[["ab"]], max_tokens=[[2]]).error is None
