"""What stands beside KServe and /v1 on the HTTP port, with keys: probes, the metrics page, and pages of other sites."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import httpx
import pytest
import typer

from llmbackend import __version__
from llmbackend.cli.flags.endpoints import CorsFlags
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.http_app import with_cors
from llmbackend.frontends.protocol_options import CorsOptions, ProtocolOptions
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host

PAGE = "https://page.example"
KEY = {"authorization": "Bearer secret"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


HOST_OPTIONS = {
    "start": partial(mock_llm_host, engine={"mock_step_ms": 5}),
    "protocols": ProtocolOptions(cors=CorsOptions(origins=(PAGE,))),
    "access": AccessControl(AccessSettings(api_keys=("secret",))),
}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/health/ready"), ("GET", "/ping"), ("POST", "/ping")]
)
def test_probes_are_open_and_empty(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_what_is_no_probe_needs_a_key(running: Running, http: httpx.Client) -> None:
    for path in ("/version", "/load", "/metrics"):
        assert http.get(path).status_code == 401
    assert http.get("/version", headers=KEY).json() == {"version": __version__}
    assert http.get("/load", headers=KEY).json() == {"server_load": 0}
    page = http.get("/metrics", headers=KEY)
    assert page.headers["content-type"] == "text/plain; charset=utf-8"
    assert f'llmbackend:max_model_len_tokens{{model="{MODEL}",version="1"}} 256' in page.text.splitlines()
    (load,) = re.findall(rf'^llmbackend:engine_load_seconds{{model="{MODEL}",version="1"}} (\S+)$', page.text, re.M)
    assert 0 < float(load) < 600


def test_sagemakers_path_answers_chats_and_completions(http: httpx.Client) -> None:
    prompt = {"model": MODEL, "prompt": "hi", "max_tokens": 3}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", prompt)):
        told, invoked = (http.post(one, json=body | {"seed": 1}, headers=KEY).json() for one in (path, "/invocations"))
        assert (invoked["object"], invoked["choices"]) == (told["object"], told["choices"])
        with http.stream("POST", "/invocations", json=body | {"stream": True}, headers=KEY) as stream:
            assert list(stream.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert http.post("/invocations", json={"model": MODEL}, headers=KEY).json()["error"]["param"] == "prompt"
    assert http.get("/invocations", headers=KEY).headers["allow"] == "POST"
    assert http.post("/invocations", json=CHAT).status_code == 401


def test_the_load_counts_inferences_that_run(http: httpx.Client) -> None:
    slow = CHAT | {"stream": True, "max_tokens": 100, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=slow, headers=KEY) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.get("/load", headers=KEY).json() == {"server_load": 1}
        assert list(lines)[-2] == "data: [DONE]"
    deadline_s = time.monotonic() + 20
    while http.get("/load", headers=KEY).json() != {"server_load": 0}:
        assert time.monotonic() < deadline_s


def test_a_preflight_needs_no_key_and_names_what_is_allowed(http: httpx.Client) -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = http.options("/v1/chat/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-credentials" not in answer.headers
    other = http.options("/v1/chat/completions", headers=asked | {"origin": "https://other.example"})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_page_may_read_answers_and_refusals(http: httpx.Client, stream: bool) -> None:
    origin = {"origin": PAGE}
    answer = http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=KEY | origin)
    assert answer.status_code == 200
    refused = http.post("/v1/chat/completions", json=CHAT, headers=origin)
    assert refused.status_code == 401
    assert [one.headers["access-control-allow-origin"] for one in (answer, refused)] == [PAGE, PAGE]
    stranger = http.post("/v1/chat/completions", json=CHAT, headers=KEY | {"origin": "https://other.example"})
    assert stranger.status_code == 403 and "--allowed-origins" in stranger.json()["error"]["message"]
    assert "access-control-allow-origin" not in stranger.headers
    no_page = http.post("/v1/chat/completions", json=CHAT, headers=KEY)
    assert not any(name.startswith("access-control") for name in no_page.headers)


def test_without_origins_there_is_no_middleware() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert with_cors(app, CorsOptions()) is app


def test_flags_take_vllms_json_or_one_value() -> None:
    assert CorsFlags().options() == CorsOptions()
    flags = CorsFlags(allowed_origins=f'["{PAGE}", "http://b"]', allow_credentials=True, allowed_methods="GET")
    assert flags.options() == CorsOptions(origins=(PAGE, "http://b"), credentials=True, methods=("GET",))
    assert CorsFlags(allowed_origins="*").options().origins == ("*",)
    for wrong in ("[1]", '["a"', "{}", '[""]'):
        with pytest.raises(typer.BadParameter, match=r"--allowed-origins is .*, expected a JSON list"):
            CorsFlags(allowed_origins=wrong).options()


def test_a_server_without_metrics_has_none_here(tmp_path_factory: pytest.TempPathFactory) -> None:
    protocols = ProtocolOptions(http_metrics=False)
    with Running(tmp_path_factory.mktemp("host"), start=mock_llm_host, protocols=protocols) as running:
        assert httpx.get(f"http://{running.http}/metrics").status_code == 404
        assert httpx.get(f"http://{running.http}/health").status_code == 200
