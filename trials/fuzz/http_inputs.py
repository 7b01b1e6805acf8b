"""Requests to each endpoint: unusual bodies, and headers that contradict them.

Used by the in-process tests and the socket targets. Independent of how a request is sent. Invariant: a request that is
executed is short (the served models have small contexts), so that the host limits the fuzzer's speed.
"""

from __future__ import annotations

import base64
import functools
import gzip
import zlib
from typing import Any

from hypothesis import strategies as st

from . import examples
from .exchange import JSON_HEADERS, Headers, HttpInput
from .inputs import as_json, json_bodies, json_like, mutated_bytes

DECOUPLED = "mock"
WHOLE = "whole"
"""The same model with decoupled: false, which /infer needs."""


def _post(paths: list[str], bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[HttpInput]:
    return st.builds(HttpInput, st.sampled_from(paths), bodies)


@st.composite
def _binary_infer(draw: st.DrawFn) -> HttpInput:
    """JSON and raw tensors, with a length header that may lie."""
    head = as_json(draw(json_like([examples.BINARY_INFER_JSON])))
    raw = draw(mutated_bytes([examples.BINARY_INFER_RAW]))
    length = draw(st.sampled_from([len(head)] * 4 + [0, -1, 1, len(head) + len(raw), 2**31, 2**63, 10**20]))
    shown = draw(st.sampled_from([str(length)] * 4 + ["", "x", " 7", "0x10", "٣", "1" * 5000, f"+{length}"]))
    headers: Headers = ((b"inference-header-content-length", shown.encode()),)
    return HttpInput(f"/v2/models/{WHOLE}/infer", head + raw, headers)


@functools.cache
def _bomb() -> bytes:
    """More than the server takes, in 80 KiB."""
    return gzip.compress(b"\0" * (80 << 20))


@st.composite
def _compressed_infer(draw: st.DrawFn) -> HttpInput:
    if draw(st.integers(0, 39)) == 39:
        return HttpInput(f"/v2/models/{WHOLE}/infer", _bomb(), ((b"content-encoding", b"gzip"),))
    body = draw(json_bodies(examples.INFER))
    encoding = draw(st.sampled_from([b"gzip", b"deflate", b"identity", b"br", b"gzip, gzip", b"\xff"]))
    packed = draw(st.sampled_from([gzip.compress, zlib.compress, lambda data: data[:9999]]))(body)
    packed = draw(st.just(packed) | mutated_bytes([packed[:2000]]))
    accept = draw(st.sampled_from([b"gzip", b"deflate;q=nan", b"gzip;q=inf,deflate;q=-1", b"*", b";;,,;q="]))
    return HttpInput(
        f"/v2/models/{WHOLE}/infer", packed, ((b"content-encoding", encoding), (b"accept-encoding", accept))
    )


@st.composite
def _generate(draw: st.DrawFn) -> HttpInput:
    """Also JSON inside JSON: sampling_parameters and messages."""
    name = draw(st.sampled_from([DECOUPLED, WHOLE]))
    kind = draw(st.sampled_from(["generate", "generate_stream"]))
    inner = draw(st.sampled_from(["", "sampling_parameters", "messages"]))
    if not inner:
        return HttpInput(f"/v2/models/{name}/{kind}", draw(json_bodies(examples.GENERATE)))
    seeds: list[Any] = examples.SAMPLING if inner == "sampling_parameters" else examples.CONVERSATIONS
    text = draw(json_bodies(seeds)).decode("utf-8", "replace")
    body = {"text_input": "x", inner: text} if inner == "sampling_parameters" else {inner: text, "max_tokens": 2}
    return HttpInput(f"/v2/models/{name}/{kind}", as_json(body))


@st.composite
def _load(draw: st.DrawFn) -> HttpInput:
    """Loads of a scratch model: config overrides and files, named and filled strangely."""
    config = draw(json_bodies([{"backend": "llm"}, {"name": "scratch", "backend": "llm", "max_batch_size": 0}]))
    model_json = draw(json_bodies([{"model": "mock", "max_model_len": 64, "transport": "inline"}]))
    file = draw(st.sampled_from(["1/model.json"] * 5 + _STRANGE_FILES))
    content = base64.b64encode(model_json).decode()
    parameters = {"config": config.decode("utf-8", "replace"), f"file:{file}": content}
    body = draw(st.just({"parameters": parameters}) | json_like([{"parameters": parameters}]))
    name = draw(st.sampled_from(["scratch"] * 6 + ["..", "%2e%2e%2fx", "a%00b", "x" * 300, "%ff", "nosuch"]))
    return HttpInput(f"/v2/repository/models/{name}/load", as_json(body))


_STRANGE_FILES = [
    "../x", "/etc/x", "1/../../x", "", ".", "1", "1/model.json/x", "a\0b", "\ud800", "x" * 300,
    "9" * 200 + "/model.json",
    "99999999999999999999/model.json", "01/model.json", "1/model.py", "config.pbtxt",
]  # fmt: skip

_EMPTY_TENSOR = {"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [0, 1], "data": []}]}
"""Refused as it stands; a step from shapes of no elements that no array can have."""

_PATHS = st.sampled_from(
    [
        "/v2/models/{}", "/v2/models/{}/config", "/v2/models/{}/stats", "/v2/models/{}/ready", "/v2/models/{}/infer",
        "/v2/models/{}/versions/{}/ready", "/v2/models/{}/versions/{}/config", "/v2/models/{}/versions/{}/generate",
        "/v2/repository/{}/index", "/v2/repository/models/{}/unload", "/v2/repository/{}/models/{}/load",
        "/v1/chat/completions/{}", "/v1/chat/completions/{}/messages?limit={}&after={}",
        "/v1/chat/completions?limit={}&after={}&metadata[{}]={}",
        "/v1/models/{}", "/v1/{}", "/v1/messages/{}", "/v1/responses/{}", "/v1/responses/{}/cancel",
        "/v1/responses/{}/input_items", "/v1/responses/{}?stream=true&starting_after={}", "/v1/conversations/{}",
        "/v1/conversations/{}/items", "/v1/conversations/{}/items/{}", "/v1/conversations/{}/items?limit={}&after={}",
        "/v2/{}", "/{}", "/v2/systemsharedmemory/region/{}/register", "/v2/health/{}",
    ]
)  # fmt: skip
_SEGMENTS = st.sampled_from(
    [
        "mock", "1", "0", "-1", "9" * 30, "9" * 5000, "%00", "%ff", "%ed%a0%80", "..", "%2e%2e", "%2f", "a%2fb",
        "x" * 3000, "%D9%A3", "%F0%9F%98%80", "", "?a=b", "#", "%", "%zz", "models", ";", "scratch",
    ]
)  # fmt: skip


@st.composite
def _path(draw: st.DrawFn) -> HttpInput:
    path = draw(_PATHS)
    for _ in range(path.count("{}")):
        path = path.replace("{}", draw(_SEGMENTS), 1)
    method = draw(st.sampled_from(["GET", "GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]))
    body = b"" if method == "GET" else draw(st.sampled_from([b"", b"{}", b"[]", b"null", b"\0"]))
    return HttpInput(path, body, JSON_HEADERS, method)


HTTP_INPUTS: dict[str, st.SearchStrategy[HttpInput]] = {
    "OpenAI chat": _post(["/v1/chat/completions"], json_bodies(examples.CHAT)),
    "OpenAI completions": _post(["/v1/completions"], json_bodies(examples.COMPLETION)),
    "Responses": _post(["/v1/responses"], json_bodies(examples.RESPONSES)),
    "input_tokens": _post(["/v1/responses/input_tokens"], json_bodies(examples.INPUT_TOKENS)),
    "conversations": _post(["/v1/conversations"], json_bodies(examples.CONVERSATIONS_MADE)),
    "Messages": _post(["/v1/messages", "/v1/messages?beta=true"], json_bodies(examples.MESSAGES)),
    "count_tokens": _post(["/v1/messages/count_tokens"], json_bodies(examples.COUNT_TOKENS)),
    "tokenize": _post(["/tokenize"], json_bodies(examples.TOKENIZE)),
    "detokenize": _post(["/detokenize"], json_bodies(examples.DETOKENIZE)),
    "generate": _generate(),
    "infer, JSON": _post(
        [f"/v2/models/{WHOLE}/infer", f"/v2/models/{DECOUPLED}/infer"], json_bodies([*examples.INFER, _EMPTY_TENSOR])
    ),
    "infer, binary": _binary_infer(),
    "infer, compressed": _compressed_infer(),
    "load": _load(),
    "index": _post(["/v2/repository/index"], json_bodies([{"ready": True}, {}])),
    "paths": _path(),
}
