"""The flags of `llmbackend serve` for its endpoints, their protocols, and web pages.

Invariant: names, defaults and meanings are Triton's. The CORS flags are vLLM's, except that without --allowed-origins
no page of another site may use the server (vLLM's default is every page).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import typer

from llmbackend.frontends.access.settings import is_local
from llmbackend.frontends.generation.sealed_reasoning import MIN_KEY_BYTES
from llmbackend.frontends.kserve.request_parameters import HeaderForward
from llmbackend.frontends.protocol_options import (
    CompressionLevel,
    CorsOptions,
    PageSettings,
    ProtocolOptions,
    pages_are_installed,
)
from llmbackend.server.ports import Endpoint

from ..command_line import bad_option, switch

_REUSE = "Let several servers listen on the port; each needs this flag."


def _port(help_text: str) -> Any:
    return typer.Option(min=0, max=65535, help=f"{help_text}; 0 picks a free one.")


@dataclass(frozen=True)
class HttpFlags:
    PANEL: ClassVar = "HTTP"

    allow_http: Annotated[Any, switch("Serve HTTP: KServe v2, generate, OpenAI.")] = True
    http_address: Annotated[str, typer.Option(help="HTTP address.")] = "0.0.0.0"
    http_port: Annotated[int, _port("HTTP port")] = 8000
    reuse_http_port: Annotated[Any, switch(_REUSE)] = False
    http_max_input_size: Annotated[int, typer.Option(min=1, help="Maximum request body, bytes.")] = 64 << 20
    openai_max_input_size: Annotated[int, typer.Option(min=1, help="Maximum request body for /v1, bytes.")] = 4 << 20

    def endpoint(self) -> Endpoint:
        return Endpoint(self.http_address, self.http_port, self.allow_http, self.reuse_http_port)


@dataclass(frozen=True)
class GrpcFlags:
    PANEL: ClassVar = "gRPC"

    allow_grpc: Annotated[Any, switch("Serve gRPC.")] = True
    grpc_address: Annotated[str, typer.Option(help="gRPC address.")] = "0.0.0.0"
    grpc_port: Annotated[int, _port("gRPC port")] = 8001

    def endpoint(self) -> Endpoint:
        return Endpoint(self.grpc_address, self.grpc_port, self.allow_grpc)


@dataclass(frozen=True)
class MetricsFlags:
    PANEL: ClassVar = "Metrics"

    allow_metrics: Annotated[Any, switch("Serve Prometheus metrics.")] = True
    metrics_address: Annotated[str, typer.Option(help="Metrics address; default: the HTTP address.")] = ""
    metrics_port: Annotated[int, _port("Metrics port")] = 8002

    def endpoint(self, default_address: str) -> Endpoint:
        address = self.metrics_address or default_address
        return Endpoint(address, self.metrics_port, self.allow_metrics)


@dataclass(frozen=True)
class SharedMemoryFlags:
    """Whether clients may use shared memory."""

    PANEL: ClassVar = "Shared memory"

    allow_client_shm: Annotated[
        Any, switch("Let clients register shared memory; default: if only loopback is served.")
    ] = None

    def allowed(self, *endpoints: Endpoint) -> bool:
        """The flag's value; without the flag, whether the `endpoints` are reachable only from this machine."""
        if self.allow_client_shm is not None:
            return bool(self.allow_client_shm)
        return all(is_local(endpoint.address) for endpoint in endpoints if endpoint.enabled)


@dataclass(frozen=True)
class ProtocolFlags:
    PANEL: ClassVar = "Protocols"

    http_header_forward_pattern: Annotated[
        str, typer.Option(help="RE2 pattern (case-insensitive) of HTTP headers that /infer passes to the model.")
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, typer.Option(help="RE2 pattern (case-insensitive) of gRPC metadata that inference passes to the model.")
    ] = ""
    grpc_infer_response_compression_level: Annotated[
        str, typer.Option(help="Compression of inference responses: none, low, medium or high.")
    ] = "none"
    allow_fault_injection: Annotated[Any, switch("Let operators kill engines over HTTP (docs/operations.md).")] = False
    reuse_grpc_port: Annotated[Any, switch("Let several servers listen on one gRPC port.")] = False
    lora_separator: Annotated[
        str, typer.Option(help="Separator of model and LoRA adapter in OpenAI requests, such as _lora_.")
    ] = ""
    lora_folder: Annotated[
        str, typer.Option(help="Folder whose LoRA adapters /v1/load_lora_adapter may load; default: none.")
    ] = ""
    reasoning_key_file: Annotated[
        Path | None,
        typer.Option(help="Key that seals reasoning for clients; 16 bytes or more, the same on all servers."),
    ] = None

    def options(self) -> ProtocolOptions:
        levels = get_args(CompressionLevel)
        if self.grpc_infer_response_compression_level not in levels:
            raise typer.BadParameter(
                f"--grpc-infer-response-compression-level is '{self.grpc_infer_response_compression_level}', "
                f"expected one of {', '.join(levels)}"
            )
        return ProtocolOptions(
            http_forward=_forward("http", self.http_header_forward_pattern),
            grpc_forward=_forward("grpc", self.grpc_header_forward_pattern),
            grpc_response_compression=self.grpc_infer_response_compression_level,  # type: ignore[arg-type]  # checked
            grpc_reuse_port=self.reuse_grpc_port,
            allow_fault_injection=self.allow_fault_injection,
            openai_lora_separator=self.lora_separator,
            openai_lora_folder=_folder("--lora-folder", self.lora_folder),
            reasoning_secret=b"" if self.reasoning_key_file is None else _secret(self.reasoning_key_file),
        )


def _folder(flag: str, path: str) -> str:
    """`path`, absolute."""
    if path and not Path(path).is_dir():
        raise typer.BadParameter(f"{flag} is '{path}', expected an existing folder")
    return str(Path(path).resolve()) if path else ""


def _secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise typer.BadParameter(f"--reasoning-key-file '{path}': {error.strerror}") from None
    if len(secret) < MIN_KEY_BYTES:
        raise typer.BadParameter(
            f"--reasoning-key-file '{path}' has {len(secret)} bytes, expected at least {MIN_KEY_BYTES}"
        )
    return secret


def _forward(protocol: str, pattern: str) -> HeaderForward:
    try:
        return HeaderForward.of(pattern)
    except ValueError as error:
        raise typer.BadParameter(
            f"--{protocol}-header-forward-pattern '{pattern}' is not a regular expression: {error}"
        ) from None


def _list(help_text: str) -> Any:
    return typer.Option(metavar="JSON", help=help_text)


@dataclass(frozen=True)
class CorsFlags:
    PANEL: ClassVar = "Cross-origin requests (CORS)"

    allowed_origins: Annotated[
        str, _list("""Pages that may use the server: '["https://a.example"]', or '["*"]' for all.""")
    ] = "[]"
    allowed_hosts: Annotated[
        str, _list("""Host names of this server for browsers: '["a.example"]' (docs/security.md).""")
    ] = "[]"
    allow_credentials: Annotated[bool, typer.Option(help="Let browsers send credentials.")] = False
    allowed_methods: Annotated[str, _list("HTTP methods that pages may use.")] = '["*"]'
    allowed_headers: Annotated[str, _list("Request headers that pages may send.")] = '["*"]'

    def options(self) -> CorsOptions:
        return CorsOptions(
            origins=_strings("--allowed-origins", self.allowed_origins),
            credentials=self.allow_credentials,
            methods=_strings("--allowed-methods", self.allowed_methods),
            headers=_strings("--allowed-headers", self.allowed_headers),
        )

    def hosts(self, further: Sequence[str] = ()) -> frozenset[str]:
        names = (*_strings("--allowed-hosts", self.allowed_hosts), *further)
        return frozenset(name.lower().strip() for name in names)


def _strings(flag: str, text: str) -> tuple[str, ...]:
    if not text.lstrip().startswith(("[", "{", '"')):
        return (text,)
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise typer.BadParameter(f"{flag} is {text}, expected a JSON list of strings or one value", param_hint=flag)
    return tuple(values)


@dataclass(frozen=True)
class PageFlags:
    PANEL: ClassVar = "Web pages"

    allow_pages: Annotated[Any, switch("Serve the web pages (chat, engine, operations); default: if installed.")] = None
    pages_host: Annotated[list[str] | None, typer.Option(help="Like --allowed-hosts, for one name; repeatable.")] = None

    def settings(self) -> PageSettings:
        is_installed = pages_are_installed()
        if self.allow_pages and not is_installed:
            raise bad_option("--allow-pages", "the pages are not installed: pip install 'llmbackend[pages]'")
        is_allowed = is_installed if self.allow_pages is None else bool(self.allow_pages)
        return PageSettings(enabled=is_allowed)
