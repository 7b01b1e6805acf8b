"""Small valid inputs of every kind, from which the fuzzers start.

Used by inputs.py's strategies. Independent of how they are changed. Invariant: each example is accepted as is
(test_in_process.py).
"""

from __future__ import annotations

from typing import Any

HELLO = [{"role": "user", "content": "hello"}]
CHAT: list[dict[str, Any]] = [
    {"model": "mock", "messages": HELLO, "max_tokens": 2},
    {
        "model": "mock",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "user", "content": "x", "name": "anna"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "3"},
        ],
        "max_completion_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 1},
        "seed": 3,
        "stop": ["q."],
        "stop_token_ids": [3],
        "logprobs": True,
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {"model": "mock", "messages": HELLO, "max_tokens": 1, "metadata": {"a": "b"}, "chat_template_kwargs": {"a": 1}},
    {"model": "mock", "messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
]
COMPLETION: list[dict[str, Any]] = [
    {"model": "mock", "prompt": "hello", "max_tokens": 2},
    {"model": "mock", "prompt": ["a", "b"], "max_tokens": 2, "echo": True, "stream": True},
    {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 1, "ignore_eos": True, "min_tokens": 1},
]
RESPONSES: list[dict[str, Any]] = [
    {"model": "mock", "input": "hello", "max_output_tokens": 2},
    {
        "model": "mock",
        "instructions": "be kind",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        ],
        "max_output_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "store": False,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": 2,
    },
    {"model": "mock", "input": "hello", "max_output_tokens": 2, "stream": True},
    {"model": "mock", "input": "hello", "max_output_tokens": 2, "background": True, "store": True},
]
INPUT_TOKENS: list[dict[str, Any]] = [{"model": "mock", "input": "hello", "instructions": "be kind"}]
CONVERSATIONS_MADE: list[dict[str, Any]] = [
    {"items": [{"role": "user", "content": "x"}], "metadata": {"a": "b"}},
    {},
]
MESSAGES: list[dict[str, Any]] = [
    {"model": "mock", "messages": HELLO, "max_tokens": 2},
    {
        "model": "mock",
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]},
        ],
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop_sequences": ["q."],
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    },
    {"model": "mock", "messages": HELLO, "max_tokens": 2, "stream": True},
]
COUNT_TOKENS: list[dict[str, Any]] = [{"model": "mock", "messages": HELLO, "system": "be kind"}]
TOKENIZE: list[dict[str, Any]] = [
    {"model": "mock", "prompt": "hello", "add_special_tokens": False, "return_token_strs": True},
    {"model": "mock", "messages": CHAT[1]["messages"], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}},
]
DETOKENIZE: list[dict[str, Any]] = [{"model": "mock", "tokens": [1, 2, 3]}]
SAMPLING: list[dict[str, Any]] = [
    {"max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 1, "ignore_eos": True},
    {"max_tokens": "3", "stop": ["a"], "stop_token_ids": [1], "logit_bias": {"3": 1.5}, "logprobs": 2, "min_tokens": 1},
    {"max_tokens": 2, "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "n": 1},
]
CONVERSATIONS: list[Any] = [
    CHAT[1]["messages"],
    {"messages": HELLO, "tools": [], "add_generation_prompt": True, "chat_template_kwargs": {"x": 1}, "documents": []},
]
GENERATE: list[dict[str, Any]] = [
    {"id": "7", "text_input": "hello", "max_tokens": 2, "temperature": 0.5, "stream": False},
    {"text_input": ["hello"], "parameters": {"max_tokens": 2, "seed": 1, "stop_token_ids": "[1]"}},
    {"messages": '[{"role": "user", "content": "x"}]', "sampling_parameters": '{"max_tokens": 2}', "stream": True},
    {"input_ids": [1, 2, 3], "max_tokens": 2, "return_finish_reason": True, "return_logprobs": True, "logprobs": 2},
]
INFER: list[dict[str, Any]] = [
    {
        "id": "7",
        "parameters": {"sequence_id": 1, "sequence_start": True, "priority": 1, "timeout": 9_000_000, "max_tokens": 2},
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}],
        "outputs": [{"name": "text_output", "parameters": {"binary_data": False}}],
    },
    {
        "parameters": {"binary_data_output": True},
        "inputs": [
            {"name": "input_ids", "datatype": "INT32", "shape": [3], "data": [1, 2, 3]},
            {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [True]},
            {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": ['{"max_tokens": 2}']},
        ],
    },
]
BINARY_INFER_JSON: dict[str, Any] = {
    "inputs": [
        {"name": "input_ids", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 21}},
    ]
}
BINARY_INFER_RAW = b"\1\0\0\0\2\0\0\0" + b'\x11\0\0\0{"max_tokens": 2}'

MODEL_JSON: list[dict[str, Any]] = [
    {"model": "mock", "max_model_len": 512, "block_size": 8, "num_kv_blocks": 160, "mock_step_ms": 0},
    {"model": "mock", "dtype": "auto", "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "max_num_seqs": "4"},
]
MINDIE_CONFIG: list[dict[str, Any]] = [
    {
        "BackendConfig": {
            "ModelDeployConfig": {
                "maxSeqLen": 512,
                "ModelConfig": [{"modelWeightPath": "mock", "trustRemoteCode": False}],
            },
            "ScheduleConfig": {"cacheBlockSize": 8, "maxBatchSize": 4, "maxPrefillTokens": 64},
        }
    }
]
CONFIG_JSON: list[dict[str, Any]] = [
    {"name": "m", "backend": "llm", "parameters": {"max_queue_size": {"string_value": "7"}}},
    {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "I", "data_type": "TYPE_FP32", "dims": [-1, 4]}],
        "output": [{"name": "O", "data_type": "TYPE_STRING", "dims": ["1"]}],
        "dynamic_batching": {
            "preferred_batch_size": [2, 4],
            "max_queue_delay_microseconds": 100,
            "default_queue_policy": {"timeout_action": "REJECT", "max_queue_size": 3},
        },
        "instance_group": [{"kind": "KIND_CPU", "count": 2}],
        "version_policy": {"specific": {"versions": [1]}},
        "model_transaction_policy": {"decoupled": True},
    },
]
CONFIG_PBTXT: list[bytes] = [
    b'backend: "llm"\nparameters { key: "max_queue_size" value { string_value: "7" } }\n',
    b"""name: "m"
backend: "python"
max_batch_size: 4
input [ { name: "I" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
output [ { name: "O" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 }
version_policy: { all { } }
model_warmup [ { name: "w" batch_size: 1 inputs { key: "I" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } } ]
""",
]
