"""Engine arguments as flags of `serve --model`: all of the table, by vLLM's names, and errors that name them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.core import TyperOption
from typer.main import get_command

from llmbackend.adapter.engine_args import OWN_PARAMETERS
from llmbackend.adapter.foreign_engine_args import FORMER_NAMES, NO_EFFECT, ONLY_VALUE
from llmbackend.adapter.schemas import sampling
from llmbackend.cli.flags.engine import GIVEN_ELSEWHERE, EngineFlags
from llmbackend.cli.serve import app as serve_app
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.engine.config import EngineConfig
from llmbackend.server import serve
from llmbackend.server.settings import ServerSettings
from llmbackend.server.start_failure import advice, as_flags
from tests.helpers.command_lines import CommandLine, last_line
from tests.helpers.tokenizers_for_tests import load_tokenizer

FIELDS = {field.name for field in msgspec.structs.fields(EngineConfig)}


@pytest.fixture
def settings_of(command_line: CommandLine) -> Any:
    return command_line.settings


def written(settings: ServerSettings, file: str = "1/model.json") -> Any:
    [repository] = settings.options.model_repositories
    return json.loads((repository / settings.flag_model / file).read_text())


def test_the_folder_of_adapters_becomes_absolute(
    settings_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = settings_of("--model", "mock", "--lora-folder", "adapters")
    assert settings.protocols.openai_lora_folder == str(tmp_path / "adapters")
    assert settings_of("--model", "mock").protocols.openai_lora_folder == ""


def test_every_argument_of_the_table_is_a_flag() -> None:
    known = FIELDS | NO_EFFECT.keys() | ONLY_VALUE.keys() | OWN_PARAMETERS.keys() | FORMER_NAMES.keys()
    assert EngineFlags.parameters().keys() - {"spec_method", "spec_model", "spec_tokens"} == known - GIVEN_ELSEWHERE


def test_flags_become_the_models_arguments(settings_of: Any, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = settings_of(
        *("--model", "mock", "--served-model-name", "m", "--max-num-seqs", "3", "--max-model-len", "1k"),
        *("--kv-cache-memory-bytes=2M", "--no-enable-prefix-caching", "--trust-remote-code", "--dtype", "half"),
        *("--speculative-config", '{"num_speculative_tokens": 2}', "--chat-template", "{{ messages[0].content }}"),
        *("--enable-lora", "--lora-modules", f"a={adapter}"),
        *("--lora-modules", json.dumps({"name": "b", "path": str(adapter)}), "--max-queue-size", "7"),
    )
    arguments = written(settings)
    assert arguments.pop("speculative_config")["num_speculative_tokens"] == 2
    assert arguments.pop("lora_modules") == {"a": str(adapter), "b": str(adapter)}
    assert arguments == {
        "model": "mock",
        "max_num_seqs": 3,
        "max_model_len": 1000,
        "kv_cache_memory_bytes": 2 << 20,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "dtype": "float16",
        "chat_template": "{{ messages[0].content }}",
        "enable_lora": True,
    }
    config = (settings.options.model_repositories[0] / "m" / "config.pbtxt").read_text()
    assert 'key: "max_queue_size" value: { string_value: "7" }' in config


def test_a_model_of_flags_is_served(settings_of: Any) -> None:
    settings = settings_of("--model", "mock", "--transport", "inline", "--max-model-len", "64", "--lora-separator", "_")
    assert written(settings) == {"model": "mock", "transport": "inline", "max_model_len": 64}
    server = InferenceServer(settings.options)
    server.start()
    [sample] = server.metric_samples("llmbackend:max_model_len_tokens")
    assert (sample.labels["model"], sample.value) == ("mock", 64)
    assert server.stop(timeout_s=20)


def test_vllms_arguments_without_effect_are_taken_and_named(
    settings_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of("--model", "mock", "--swap-space", "4", "--disable-log-requests", "--task", "generate")
    assert written(settings) == {"model": "mock"}
    warnings = capsys.readouterr().err
    assert "Warning: --swap-space has no effect here" in warnings
    assert "Warning: --disable-log-requests has no effect here" in warnings


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--dtype", "int3"], "--dtype is 'int3', expected 'auto' or "),
        (["--tool-call-parser", "hermes2"], "--tool-call-parser is 'hermes2', expected one of: "),
        (["--reasoning-parser", "qwen"], "--reasoning-parser is 'qwen', expected one of: "),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0, expected at least 1"),
        (["--max-num-seqs", "many"], "--max-num-seqs is 'many': "),
        (["--task", "embed"], '--task is \'embed\', only "auto" or "generate" is supported'),
        (["--speculative-config", "{a"], "--speculative-config is '{a': "),
        (["--tokenizer", "/no/such"], "--tokenizer is '/no/such', which does not exist"),
        (["--chat-template", "no.jinja"], "--chat-template is 'no.jinja', expected an existing file or a Jinja"),
        (["--lora-modules", "x"], "--lora-modules is 'x', expected NAME=PATH"),
        (["--lora-folder", "/nowhere"], "--lora-folder is '/nowhere', expected an existing folder"),
        (["--lora-modules", "a=b"], "--lora-modules is set, expected --enable-lora with it"),
        (["--enable-l"], "--enable-l is ambiguous, expected one of --enable-log-requests, --enable-lora"),
        (["--request-timeout-s", "-1"], "--request-timeout-s is '-1', expected a number of seconds above 0"),
        (["--model=", "--max-num-seqs=2"], "--max-num-seqs is an engine argument of --model"),
    ],
)
def test_errors_name_the_flag(flags: list[str], reason: str, command_line: CommandLine) -> None:
    assert last_line(command_line.refusal_of_flags("--model", "mock", *flags)).startswith(reason)


def test_a_hub_that_does_not_answer_is_no_fault_of_the_generation_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, interpreter: str) -> Path:
        raise OSError(f"{source} is out of reach")

    monkeypatch.setattr(sampling, "local_directory", refuse)
    with pytest.raises(TritonError) as caught:
        sampling.read_sampling_defaults(EngineConfig(model="org/name"))
    said = as_flags(caught.value.message)
    assert said.startswith(
        "--model is 'org/name', which is not a local directory, and the hub did not return its files: "
    )
    assert "check the name and the network" in advice(said).lower()


def test_what_the_engine_says_later_names_the_flag_too() -> None:
    reason = "the engine of 'm_0' did not start: engine argument 'max_model_len' is 9, expected at most 2"
    said = serve.reasons_with_flags({"m": reason, "other": reason}, "m")
    assert said["m"] == "the engine of 'm_0' did not start: --max-model-len is 9, expected at most 2"
    assert said["other"] == reason
    assert as_flags("parameter 'max_queue_size' is 'x'") == "--max-queue-size is 'x'"


def test_a_chat_template_takes_the_place_of_the_models(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = tmp_path / "t.jinja"
    file.write_text("[{{ messages[0].content }}]")
    for given in (str(file), file.read_text()):
        assert load_tokenizer("mock", chat_template=given).render_chat(messages, None, {}) == "[hi]"
        assert load_tokenizer("model_repository/demo/1", chat_template=given).render_chat(messages, None, {}) == "[hi]"
    assert load_tokenizer("mock").render_chat(messages, None, {}) == "user: hi\nassistant: "


def test_the_help_has_groups_and_every_flag_whole(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command_line.run("serve", "--help")
    page = capsys.readouterr().out
    for title in ("Models", "--model: memory and batches", "--model: LoRA adapters", "HTTP", "Limits", "Log"):
        assert f"\n{title}:\n" in page
    parameters = [parameter for parameter in get_command(serve_app).params if isinstance(parameter, TyperOption)]
    shown = {flag for parameter in parameters if not parameter.hidden for flag in parameter.opts}
    words = set(re.split(r"[\s,]+", page))
    assert "--structured-outputs-config" in shown and shown - words == set()
    assert max(map(len, page.splitlines())) <= 80
    assert "--swap-space" not in page
