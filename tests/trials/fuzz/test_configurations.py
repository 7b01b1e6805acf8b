"""Strange configurations of each kind: read, or refused with a TritonError."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from llmbackend.core.errors import TritonError
from trials.fuzz import examples
from trials.fuzz.configurations import CONFIG_INPUTS, ConfigInput, ConfigReader, Kind
from trials.fuzz.inputs import as_json


@pytest.mark.parametrize("kind", CONFIG_INPUTS)
def test_strange_configurations(kind: str, tmp_path: Path) -> None:
    reader = ConfigReader(tmp_path)

    @settings(suppress_health_check=list(HealthCheck))
    @given(CONFIG_INPUTS[kind])
    def run(read: ConfigInput) -> None:
        with contextlib.suppress(TritonError):
            reader.read(read)

    run()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (b'"\\ud800"', "Invalid config override"),  # a SystemError inside of the protobuf library
        (b'{"backend": "llm", "input": [{"name": "text_input", "data_type": 99, "dims": [1]}]}', "no value 99"),
        (b'{"backend": "llm", "instance_group": [{"kind": 7}]}', "no value 7"),
    ],
)
def test_regressions(config: bytes, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TritonError, match="failed to poll"):
        ConfigReader(tmp_path).read(ConfigInput("config override", config))
    assert text in caplog.text


def test_half_a_surrogate_pair_as_an_engine_argument(tmp_path: Path) -> None:
    given = ConfigInput("model.json", b'{"model": "mock", "max_model_len": "\\ud800"}')
    with pytest.raises(TritonError, match="'max_model_len'"):
        ConfigReader(tmp_path).read(given)


VALID: list[tuple[Kind, bytes]] = [
    *[("config.pbtxt", content) for content in examples.CONFIG_PBTXT],
    *[("config override", as_json(value)) for value in examples.CONFIG_JSON],
    *[("model.json", as_json(value)) for value in examples.MODEL_JSON],
    *[("MindIE config.json", as_json(value)) for value in examples.MINDIE_CONFIG],
]


@pytest.mark.parametrize(("kind", "content"), VALID)
def test_the_examples_are_valid(kind: Kind, content: bytes, tmp_path: Path) -> None:
    ConfigReader(tmp_path).read(ConfigInput(kind, content))
