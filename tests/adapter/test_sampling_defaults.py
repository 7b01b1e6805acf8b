"""A model's generation_config.json: what counts where a request does not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmbackend.adapter.schemas.sampling import parse_sampling_parameters, read_sampling_defaults
from llmbackend.core.backend_api import ErrorCode, TritonError
from llmbackend.engine.config import EngineConfig
from tests.helpers.llm_host import LlmHost, llm_host

FILE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 7,
    "eos_token_id": [1, 2],
    "transformers_version": "4.51.0",
}
DEFAULTS = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_tokens": 7,
}
GREEDY = {"temperature": 0}


def folder(path: Path, **values: Any) -> Path:
    path.mkdir()
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_the_models_file_counts_unless_another_or_none_is_named(tmp_path: Path) -> None:
    model, other = folder(tmp_path / "model", **FILE), folder(tmp_path / "other", temperature=0.5)
    assert read_sampling_defaults(EngineConfig(model=str(model))) == DEFAULTS
    assert read_sampling_defaults(EngineConfig(model=str(model), generation_config="vllm")) == {}
    assert read_sampling_defaults(EngineConfig(model=str(model), generation_config=str(other))) == {"temperature": 0.5}
    (model / "generation_config.json").unlink()
    assert read_sampling_defaults(EngineConfig(model=str(model))) == {}


def test_the_operators_override_wins(tmp_path: Path) -> None:
    override = {"temperature": 0.1, "max_new_tokens": 9}
    model = str(folder(tmp_path / "model", **FILE))
    read = read_sampling_defaults(EngineConfig(model=model, override_generation_config=override))
    assert read == {**DEFAULTS, "temperature": 0.1, "max_tokens": 9}
    alone = EngineConfig(model=model, generation_config="vllm", override_generation_config=override)
    assert read_sampling_defaults(alone) == {"temperature": 0.1, "max_tokens": 9}


def test_a_wrong_value_is_left_out_of_a_file_and_refused_of_an_operator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(folder(tmp_path / "model", temperature=-1, top_k=3, top_p=None))
    assert read_sampling_defaults(EngineConfig(model=model)) == {"top_k": 3}
    assert "'temperature' is not used: sampling parameter 'temperature' is -1" in caplog.text
    for wrong, expected in (
        ({"override_generation_config": {"temperature": -1}}, "'override_generation_config': 'temperature' is -1: "),
        ({"override_generation_config": {"num_beams": 2}}, "'num_beams' is not supported, expected one of: "),
        ({"generation_config": "nowhere"}, "'generation_config' is 'nowhere': expected 'auto', 'vllm' or a folder"),
    ):
        with pytest.raises(TritonError) as caught:
            read_sampling_defaults(EngineConfig(model=model, **wrong))
        assert caught.value.code is ErrorCode.INVALID_ARG and expected in caught.value.message


def test_a_request_wins_over_the_defaults_and_null_asks_for_them() -> None:
    def parsed(remaining_tokens: int = 100, **values: Any) -> Any:
        params = parse_sampling_parameters(values, remaining_tokens=remaining_tokens, vocab_size=259, defaults=DEFAULTS)
        return params.sampling

    silent = parsed()
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.6, 0.95, 20, 0.1)
    assert (silent.repetition_penalty, silent.max_tokens) == (1.05, 7)
    asked = parsed(temperature=1, top_k=0, max_tokens=50)
    assert (asked.temperature, asked.top_k, asked.top_p, asked.max_tokens) == (1.0, 0, 0.95, 50)
    assert (parsed(temperature=None, max_tokens=None).temperature, parsed(max_tokens=None).max_tokens) == (0.6, 7)
    assert parsed(remaining_tokens=3).max_tokens == 3


def num_tokens(host: LlmHost, **inputs: Any) -> int:
    (count,) = host.infer(text_input="a", return_num_output_tokens=True, **inputs).all("num_output_tokens")
    return int(count)


def test_a_served_model_has_its_defaults_and_relative_folders_are_the_versions(tmp_path: Path) -> None:
    override = {"temperature": 0, "max_new_tokens": 5}
    with llm_host(tmp_path / "a", override_generation_config=override) as host:
        assert num_tokens(host) == 5
        assert num_tokens(host, sampling={"max_tokens": 2}) == 2
        assert host.infer(text_input="a").text == host.infer(text_input="a", sampling=GREEDY).text
    folder(tmp_path / "own", max_new_tokens=6, temperature=0.0)
    with llm_host(tmp_path / "b", generation_config=str(tmp_path / "own")) as host:
        assert num_tokens(host) == 6
    with llm_host(tmp_path / "c") as host:
        assert num_tokens(host, sampling=GREEDY) == 16


def test_the_operators_max_new_tokens_limits_requests_and_the_models_own_does_not(tmp_path: Path) -> None:
    long = {"max_tokens": 30, "ignore_eos": True}
    own = str(folder(tmp_path / "own", max_new_tokens=6))
    override = {"max_new_tokens": 5}
    for name, arguments, count in (
        ("a", {"override_generation_config": override}, 5),
        ("b", {"generation_config": own}, 6),
        ("c", {"generation_config": own, "override_generation_config": override}, 5),
        ("d", {"override_generation_config": {"temperature": 0}}, 30),
    ):
        with llm_host(tmp_path / name, **arguments) as host:
            assert num_tokens(host, sampling=long) == count


def test_the_backend_name_vllm_has_vllm_backends_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vllm_backend makes SamplingParams of what a request says, and never asks the model for defaults."""
    own = str(folder(tmp_path / "own", max_new_tokens=6, temperature=0.0))
    with llm_host(tmp_path / "a", generation_config=own) as host:
        assert num_tokens(host) == 6
    assert not caplog.text
    arguments: dict[str, Any] = {"generation_config": own, "override_generation_config": {"max_new_tokens": 5}}
    with llm_host(tmp_path / "b", backend="vllm", **arguments) as host:
        assert num_tokens(host, sampling={"ignore_eos": True}) == 16
        assert num_tokens(host, sampling={"max_tokens": 2}) == 2
    assert "'mock_llm': generation_config and override_generation_config have no effect" in caplog.text


def test_tensorrtllms_tensors_keep_tensorrtllms_defaults(tmp_path: Path) -> None:
    pbtxt = 'parameters { key: "tensor_schema" value { string_value: "tensorrtllm" } }'
    with llm_host(tmp_path, pbtxt, override_generation_config={"repetition_penalty": 2.0, "max_new_tokens": 5}) as host:
        call = host.infer(text_input="a", max_tokens=[9], return_num_output_tokens=True)
        assert call.all("num_output_tokens") == [9]
