"""Those flags of `vllm serve` for the server that have an effect, with vLLM's meanings. The others are in `inert.py`,
those of the engine in `engine.py`. If Triton has a flag with the same name, Triton's meaning applies (--grpc-port)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from starlette.types import ASGIApp

from llmbackend.frontends.protocol_options import ProtocolOptions, RequestDefaults
from llmbackend.server.hub import CHECKPOINT, CODE, TOKENIZER, HubError, fetch, is_hub_id
from llmbackend.server.known_models import DIRECTORY
from llmbackend.server.ports import UNIX, Endpoint

from ..command_line import bad_option
from ..models import go_offline, local_model
from .endpoints import GrpcFlags, HttpFlags, MetricsFlags
from .engine import EngineFlags


@dataclass(frozen=True)
class VllmServerFlags:
    PANEL: ClassVar = "Flags of vllm serve for the server"

    config: Annotated[
        Path | None, typer.Option(help="YAML file with flags by name; the command line takes precedence.")
    ] = None
    host: Annotated[str, typer.Option(help="Address of HTTP, gRPC and metrics, unless their own flags set one.")] = ""
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="HTTP port for all APIs and /metrics. With it, or with MODEL, gRPC and a separate metrics port "
            "are opened only if --grpc-port or --metrics-port is given.",
        ),
    ] = None
    uds: Annotated[Path | None, typer.Option(help="Path of a Unix socket on which to serve HTTP instead.")] = None
    root_path: Annotated[str, typer.Option(help="Path prefix under which a proxy serves this server; for /docs.")] = ""
    disable_fastapi_docs: Annotated[bool, typer.Option(help="Serve neither /openapi.json nor /docs.")] = False
    enable_request_id_headers: Annotated[
        bool, typer.Option(help="Add X-Request-Id to responses: the client's, or a new one.")
    ] = False
    enable_tokenizer_info_endpoint: Annotated[bool, typer.Option(help="Serve GET /tokenizer_info.")] = False
    middleware: Annotated[
        list[str] | None,
        typer.Option(help="Import path of an ASGI middleware, a class or a coroutine function; repeatable."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, typer.Option(help="Identify tokens in log probabilities as token_id:7.")
    ] = False
    enable_force_include_usage: Annotated[
        bool, typer.Option(help="Every chunk of a streamed chat or completion has the usage so far.")
    ] = False
    stream_interval: Annotated[
        int, typer.Option(min=1, help="Tokens of a choice per chunk of a stream; a request can only ask for more.")
    ] = 1
    enable_per_request_metrics: Annotated[
        bool, typer.Option(help="Add timings (`metrics`) to chats and completions with one choice.")
    ] = False
    sse_keep_alive_interval: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds of silence after which a /v1 stream sends a comment, unless it is resumable or in the "
            "background; 0 = never.",
        ),
    ] = 15.0
    fingerprint_mode: Annotated[
        str, typer.Option(help="Form of system_fingerprint: full or hash (of release and model), custom, or none.")
    ] = "full"
    fingerprint_value: Annotated[str, typer.Option(help="The fingerprint for --fingerprint-mode custom.")] = ""
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub id.")] = ""
    tokenizer_revision: Annotated[str, typer.Option(help="Likewise for the hub id of --tokenizer.")] = ""
    download_dir: Annotated[
        Path | None, typer.Option(help="Folder for downloaded models; default: HF_HUB_CACHE, or HF_HOME/hub.")
    ] = None
    hf_token: Annotated[str, typer.Option(help="Token for the hub; default: HF_TOKEN.")] = ""
    offline: Annotated[
        bool, typer.Option(help="Download nothing; fail if files are missing. Also HF_HUB_OFFLINE=1.")
    ] = False

    def endpoints(
        self, http: HttpFlags, grpc: GrpcFlags, metrics: MetricsFlags, has_model: bool, is_given: Callable[[str], bool]
    ) -> dict[str, Endpoint]:
        """The endpoints by protocol. has_model: whether the command line has MODEL. is_given: whether a flag is set, by
        the name of its field. Raises BadParameter."""
        found = {"HTTP": http.endpoint(), "GRPC": grpc.endpoint(), "metrics": metrics.endpoint(http.http_address)}
        if self.host:
            for name, field in (("HTTP", "http_address"), ("GRPC", "grpc_address"), ("metrics", "metrics_address")):
                if not is_given(field):
                    found[name] = replace(found[name], address=self.host)
        if self.port is not None:
            if is_given("http_port") and http.http_port != self.port:
                raise bad_option("--port", f"--port is {self.port} and --http-port {http.http_port}: they are one port")
            found["HTTP"] = replace(found["HTTP"], port=self.port)
        if self.uds is not None:
            found["HTTP"] = replace(found["HTTP"], address=f"{UNIX}{self.uds.expanduser().resolve()}", port=0)
        if self.is_on_one_port(has_model):
            for name, fields in (("GRPC", ("grpc_port", "allow_grpc")), ("metrics", ("metrics_port", "allow_metrics"))):
                if not any(is_given(field) for field in fields):
                    found[name] = replace(found[name], enabled=False)
        return found

    def check_one_process(self) -> None:
        """Raises BadParameter for a flag that would not reach the other processes, which have the connections."""
        for flag, value in (("--uds", self.uds), ("--middleware", self.middleware)):
            if value:
                raise bad_option(flag, f"{flag} cannot be combined with --frontend-processes or --cluster")

    def applied_to(self, options: ProtocolOptions) -> ProtocolOptions:
        return replace(
            options,
            root_path=self._checked_root_path(),
            documents_api=not self.disable_fastapi_docs,
            answers_request_ids=self.enable_request_id_headers,
            shows_tokenizers=self.enable_tokenizer_info_endpoint,
            middleware=tuple(map(_imported, self.middleware or ())),
            openai_fingerprint=self._fingerprint(),
            request_defaults=RequestDefaults(
                return_tokens_as_token_ids=self.return_tokens_as_token_ids,
                force_include_usage=self.enable_force_include_usage,
                stream_interval_tokens=self.stream_interval,
                per_request_metrics=self.enable_per_request_metrics,
                sse_keep_alive_s=self.sse_keep_alive_interval or None,
            ),
        )

    def _fingerprint(self) -> str | None:
        """None = each model has its own fingerprint."""
        if self.fingerprint_mode not in ("full", "hash", "custom", "none"):
            expected = "expected full, hash, custom or none"
            raise bad_option("--fingerprint-mode", f"--fingerprint-mode is '{self.fingerprint_mode}', {expected}")
        if (self.fingerprint_mode == "custom") != bool(self.fingerprint_value):
            message = "--fingerprint-mode custom and --fingerprint-value are expected together"
            raise bad_option("--fingerprint-value", message)
        return {"custom": self.fingerprint_value, "none": ""}.get(self.fingerprint_mode)

    def _checked_root_path(self) -> str:
        path = self.root_path.rstrip("/")
        if path and not path.startswith("/"):
            raise bad_option("--root-path", f"--root-path is '{self.root_path}', expected a path that begins with /")
        return path

    def is_on_one_port(self, has_model: bool) -> bool:
        """Whether gRPC and a separate metrics port are opened only on request."""
        return has_model or self.port is not None or self.uds is not None

    def fetched(self, model: str, engine: EngineFlags) -> tuple[str, EngineFlags]:
        """The folder or file of `model` (fetched if it is a hub id or a known model), and the flags, including the
        tokenizer's folder if its revision is set. Raises BadParameter that says what is missing, or ends the command.
        """
        if self.offline:
            go_offline()
        if self.hf_token:
            os.environ["HF_TOKEN"] = self.hf_token
        if self.download_dir is not None:
            os.environ["HF_HUB_CACHE"] = os.environ[DIRECTORY] = str(self.download_dir.expanduser().resolve())
        if self.tokenizer_revision:
            tokenizer = engine.get("tokenizer") or model
            folder = _fetched(tokenizer, "tokenizer-revision", self.tokenizer_revision, TOKENIZER)
            engine = engine.with_values({"tokenizer": folder})
        code = (CODE,) if engine.get("trust_remote_code") else ()
        return _fetched(model, "revision", self.revision, (*CHECKPOINT, *code)), engine


def _imported(path: str) -> Callable[[ASGIApp], ASGIApp]:
    from llmbackend.frontends.http_app import imported_middleware

    try:
        return imported_middleware(path)
    except ValueError as error:
        raise bad_option("--middleware", f"--middleware {error}") from None


def _fetched(source: str, flag: str, revision: str, patterns: Sequence[str]) -> str:
    if not is_hub_id(source):
        if revision:
            flag = f"--{flag}"
            raise bad_option(flag, f"{flag} is '{revision}', expected only for the id of a hub, not for '{source}'")
        return local_model(source)
    try:
        return str(fetch(source, revision, patterns))
    except HubError as error:
        raise bad_option("MODEL", str(error)) from None
