"""--trace-config, the --trace-* flags before it, and the flags of protocols: what they make of the command line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer

from llmbackend.cli.flags.endpoints import ProtocolFlags
from llmbackend.cli.flags.observability import TraceFlags
from llmbackend.core.tracing.trace import OpenTelemetryOptions, TraceLevel, TraceSettings
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.grpc.server import create_grpc_server
from llmbackend.frontends.protocol_options import ProtocolOptions
from tests.helpers.kserve_runner import Running


def settings(*config: str, **deprecated: Any) -> TraceSettings:
    return TraceFlags(trace_config=list(config), **deprecated).settings()


def test_defaults_are_tritons() -> None:
    assert settings() == TraceSettings(rate=1000, count=-1, log_frequency=0, file="", mode="triton")


def test_trace_config_of_mode_triton() -> None:
    made = settings(
        *("triton,file=/tmp/a,b=c.json", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS"),
        *("level=tensors", "count=7", "opentelemetry,url=http://ignored"),
    )
    assert made == TraceSettings(
        level=TraceLevel.TIMESTAMPS | TraceLevel.TENSORS, rate=100, count=7, log_frequency=50, file="/tmp/a,b=c.json"
    )


def test_off_wins_over_other_levels() -> None:
    assert settings("level=TIMESTAMPS", "level=OFF").level is TraceLevel.OFF


def test_trace_config_of_mode_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    made = settings(
        *("mode=opentelemetry", "opentelemetry,url=http://c:4318/v1/traces", "triton,file=ignored", "rate=0"),
        *("opentelemetry,resource=service.name=mine", "opentelemetry,resource=a=b=c"),
        "opentelemetry,bsp_max_queue_size=1024",
    )
    assert made == TraceSettings(
        rate=0,
        mode="opentelemetry",
        open_telemetry=OpenTelemetryOptions(
            url="http://c:4318/v1/traces",
            resource={"service.name": "mine", "a": "b=c"},
            bsp_max_queue_size=1024,
            bsp_schedule_delay_ms=200,
        ),
    )


def test_vllms_endpoint_is_grpc_unless_its_path_or_a_variable_says_http(monkeypatch: pytest.MonkeyPatch) -> None:
    def uses_grpc(url: str) -> bool:
        return TraceFlags(otlp_traces_endpoint=url).settings().open_telemetry.uses_grpc

    for url in ("grpc://c:4317", "http://c:4317", "c:4317/"):
        assert uses_grpc(url)
    for url in ("http://c:4318/v1/traces", "c:4318/v1/traces"):
        assert not uses_grpc(url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert uses_grpc("http://c:4318/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert not uses_grpc("http://c:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(typer.BadParameter, match="'http/json', expected grpc or http/protobuf"):
        uses_grpc("http://c:4318")


def test_variables_of_opentelemetry_mean_nothing_in_another_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "a while")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096")
    assert settings("rate=5") == TraceSettings(rate=5)
    with pytest.raises(typer.BadParameter, match="OTEL_BSP_SCHEDULE_DELAY"):
        settings("mode=opentelemetry")


def test_deprecated_flags_still_mean_what_they_did_and_say_what_replaced_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = settings(trace_file="f", trace_level=["MAX", "TENSORS"], trace_rate=3, trace_count=4, trace_log_frequency=5)
    assert made == TraceSettings(
        level=TraceLevel.TIMESTAMPS | TraceLevel.TENSORS, rate=3, count=4, log_frequency=5, file="f"
    )
    warnings = capsys.readouterr().err
    assert "Warning: '--trace-rate' has been deprecated" in warnings and warnings.count("--trace-config") == 5
    assert settings("rate=9", trace_rate=3).rate == 9


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("rate", "--trace-config option format is '<trace mode>,<setting>=<value>'. Got rate"),
        ("rate=", "option format"),
        (",rate=1", "No trace mode specified"),
        ("jaeger,url=x", 'invalid value for trace mode option: jaeger. Available options are "triton" and'),
        ("mode=x", "invalid value for trace mode option: x"),
        ("level=x", "invalid value for trace level option: x"),
        ("rate=x", 'Bad option: "--trace-config rate"'),
        ("rate=-1", "trace setting 'rate' is -1, expected at least 0"),
        ("count=-2", "expected at least -1"),
        ("triton,path=x", "unknown setting 'path', expected file, log-frequency"),
    ],
)
def test_wrong_trace_settings_are_refused_by_name(item: str, text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        settings(item)
    assert text in caught.value.message


def test_wrong_batches_of_spans_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="bsp_max_export_batch_size"):
        settings("mode=opentelemetry", "opentelemetry,bsp_max_queue_size=2")


def test_the_compression_level_is_taken_over() -> None:
    options = ProtocolFlags(grpc_infer_response_compression_level="low").options()
    assert options.grpc_response_compression == "low"


@pytest.mark.parametrize(
    "wrong", [{"http_header_forward_pattern": "("}, {"grpc_infer_response_compression_level": "most"}]
)
def test_wrong_protocol_flags_are_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(typer.BadParameter) as caught:
        ProtocolFlags(**wrong).options()
    assert f"--{name.replace('_', '-')}" in caught.value.message and f"'{value}'" in caught.value.message


def test_the_command_line_takes_all_of_them() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "llmbackend.cli", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for flag in (
        *("--trace-config", "--trace-rate", "--http-header-forward-pattern", "--grpc-header-forward-pattern"),
        *("--grpc-infer-response-compression-level", "--grpc-infer-thread-count", "--log-file", "--reuse-grpc-port"),
        *("--grpc-keepalive-time", "--grpc-max-connection-age", "--grpc-max-connection-age-grace"),
    ):
        assert flag in text


@pytest.mark.parametrize("shared", [True, False])
def test_two_servers_share_a_grpc_port_when_both_ask_for_it(running: Running, shared: bool) -> None:
    async def two() -> None:
        context = FrontendContext.of(running.host, options=ProtocolOptions(grpc_reuse_port=shared))
        first, port = await create_grpc_server(context, address="127.0.0.1:0")
        await first.start()
        try:
            second, again = await create_grpc_server(context, address=f"127.0.0.1:{port}")
            await second.start()
            await second.stop(None)
            assert again == port
        finally:
            await first.stop(None)

    if shared:
        running.call(two())
    else:
        with pytest.raises(RuntimeError):
            running.call(two())
