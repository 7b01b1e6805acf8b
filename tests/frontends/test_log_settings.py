"""The logging extension over real HTTP and gRPC, --log-file, and log lines as Triton writes them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.server_log import LogSettings, ServerLog, TritonFormatter
from tests.helpers.kserve_runner import Running

DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{running.http}", timeout=20) as client:
        yield client
        client.post("/v2/logging", json={key: value for key, value in DEFAULTS.items() if key != "log_file"})


@pytest.fixture
def stub(running: Running, client: httpx.Client) -> Iterator[Any]:
    with grpc.insecure_channel(running.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_settings_over_http(client: httpx.Client) -> None:
    assert client.get("/v2/logging").text == json.dumps(DEFAULTS, separators=(",", ":"))
    changed = client.post("/v2/logging", json={"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"})
    assert changed.json() == DEFAULTS | {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert client.get("/v2/logging").json() == changed.json()
    assert client.post("/v2/logging", json={"nosuch": 1, "log_file": None, "log_info": None}).json() == changed.json()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"log_file": "/tmp/x"}, 501, "log file location can not be updated through network protocol"),
        ({"log_verbose_level": "x"}, 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_verbose_level": 1 << 40}, 400, "log_verbose_level is 1099511627776, expected at most 2147483647"),
        ({"log_info": 1}, 500, "attempt to access JSON non-boolean as boolean"),
        ({"log_format": 1}, 500, "attempt to access JSON non-string as string"),
        ({"log_format": "xml"}, 503, "invalid argument for --log_format, got: xml"),
    ],
)
def test_bad_settings_are_refused_whole(client: httpx.Client, body: dict[str, Any], status: int, error: str) -> None:
    response = client.post("/v2/logging", json={"log_warning": False} | body)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert client.get("/v2/logging").json() == DEFAULTS


def test_settings_over_grpc(stub: Any) -> None:
    def setting(**values: Any) -> dict[str, Any]:
        request = pb.LogSettingsRequest()
        for key, (choice, value) in values.items():
            setattr(request.settings[key], choice, value)
        answer = stub.LogSettings(request).settings
        return {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in answer.items()}

    assert setting() == DEFAULTS
    changed = setting(log_error=("bool_param", False), log_verbose_level=("uint32_param", 3))
    assert changed == DEFAULTS | {"log_error": False, "log_verbose_level": 3}
    for values, code, text in (
        ({"log_file": ("string_param", "x")}, "UNIMPLEMENTED", "log file location can not be updated"),
        ({"log_info": ("string_param", "x")}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_verbose_level": ("bool_param", True)}, "INVALID_ARGUMENT", "expect int32 for 'log_verbose_level'"),
        ({"log_format": ("string_param", "xml")}, "INVALID_ARGUMENT", "invalid argument for log_format, got: xml"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            setting(**values)
        error: Any = caught.value
        assert error.code().name == code and text in error.details()


def test_tritonclients_own_methods(running: Running, client: httpx.Client) -> None:
    with tritonclient.http.InferenceServerClient(running.http) as http_client:
        assert http_client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    with tritonclient.grpc.InferenceServerClient(running.grpc) as grpc_client:
        settings = grpc_client.get_log_settings(as_json=True)["settings"]
        assert settings["log_verbose_level"] == {"uint32_param": 1}


# --- the log itself ---------------------------------------------------------------------------------------------------


def test_changed_settings_change_what_is_logged(untouched_logging: None, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("before\n")
    server_log = ServerLog(LogSettings(file=str(path)))
    server_log.install()
    log = logging.getLogger("llmbackend.test")

    def lines(**changes: Any) -> list[str]:
        server_log.update(**changes)
        begin = len(path.read_text().splitlines())
        log.debug("d")
        log.info("i")
        log.warning("w")
        log.error("e")
        return [line[0] for line in path.read_text().splitlines()[begin:]]

    assert lines() == ["I", "W", "E"]
    assert lines(verbose=1) == ["V", "I", "W", "E"]
    assert lines(verbose=0, info=False) == ["W", "E"]
    assert lines(warning=False, error=False) == []
    assert lines(error=True, format="ISO8601") == ["2"]  # a year
    assert path.read_text().startswith("before\n")


def test_a_file_that_was_moved_is_opened_again(untouched_logging: None, tmp_path: Path) -> None:
    """As logrotate does."""
    path = tmp_path / "folder" / "server.log"
    path.parent.mkdir()
    ServerLog(LogSettings(file=str(path))).install()
    log = logging.getLogger("llmbackend.test")
    log.info("first")
    path.rename(path.with_suffix(".1"))
    log.info("second")
    assert "first" in path.with_suffix(".1").read_text()
    assert "second" in path.read_text() and "first" not in path.read_text()
    path.parent.rename(tmp_path / "moved")
    log.info("lost")
    path.parent.mkdir()
    log.info("third")
    assert "third" in path.read_text()


def record(text: str) -> logging.LogRecord:
    made = logging.LogRecord("n", logging.WARNING, "/a/server.py", 7, text, None, None)
    made.created, made.process = 1_732_158_184.000123, 42
    return made


def test_the_default_format_is_tritons() -> None:
    assert TritonFormatter("default").format(record('say "hi"\nand go')) == (
        r'W1121 03:03:04.000123 42 server.py:7] "say \"hi\"\nand go"'
    )


def test_the_iso8601_format_is_tritons() -> None:
    line = TritonFormatter("ISO8601").format(record("x"))
    assert re.fullmatch(r'2024-11-21T03:03:04Z W 42 server\.py:7\] "x"', line)


def test_messages_are_not_escaped_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", "0")
    assert TritonFormatter("default").format(record('say "hi"')).endswith('] say "hi"')
