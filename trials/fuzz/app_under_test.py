"""The HTTP application around a real host with a mock model, called without sockets.

Used by the bounded tests of the suite. Independent of what is sent. Invariant: a request has HANG_S seconds; errors
logged with a traceback while it runs are reported with its answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, MutableMapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http.request_scope import PRESENCE, ClientPresence
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.journals.store_settings import StoreSettings
from llmbackend.frontends.openai.router import create_openai_router

from .exchange import HttpAnswer, HttpInput
from .http_inputs import DECOUPLED, WHOLE

Result = TypeVar("Result")
HANG_S = 5.0
CONFIG_PBTXT = 'backend: "llm"\nmodel_transaction_policy { decoupled: %s }\n'


def write_models(repository: Path, **engine_args: Any) -> None:
    """`mock`, which streams, and `whole`, which does not."""
    for name, decoupled in ((DECOUPLED, "true"), (WHOLE, "false")):
        version = repository / name / "1"
        version.mkdir(parents=True)
        arguments = {"model": "mock", "max_model_len": 64, "num_kv_blocks": 64, **engine_args}
        (version / "model.json").write_text(json.dumps(arguments))
        (version.parent / "config.pbtxt").write_text(CONFIG_PBTXT % decoupled)


class AppUnderTest:
    def __init__(self, repository: Path) -> None:
        write_models(repository, transport="inline")
        options = ServerOptions(
            model_repositories=(repository,), model_control_mode="explicit", startup_models=(DECOUPLED, WHOLE)
        )
        self.server = InferenceServer(options)
        self.server.start()
        self._store = StoreSettings().open()
        self.context = FrontendContext.of(self.server, store=self._store)
        routers = (create_anthropic_router(self.context), create_openai_router(self.context))
        self._app = create_http_app(self.context, routers)
        self._loop = asyncio.new_event_loop()
        self._tracebacks = _Tracebacks()
        logging.getLogger().addHandler(self._tracebacks)
        self._start_threads()

    def _start_threads(self) -> None:
        """Those that the first request of a kind starts: a test must not be the one that leaves them behind."""
        for model in (DECOUPLED, WHOLE):
            body = {"text_input": "x", "max_tokens": 1}
            self.send(HttpInput(f"/v2/models/{model}/generate", json.dumps(body).encode()))
            self.send(HttpInput("/v1/responses", json.dumps({"model": DECOUPLED, "input": "x"}).encode()))
            infer = {"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1], "data": [1]}]}
            timed = infer | {"parameters": {"timeout": 60_000_000, "max_tokens": 1}}
            self.send(HttpInput(f"/v2/models/{model}/infer", json.dumps(timed).encode()))

    def close(self) -> None:
        logging.getLogger().removeHandler(self._tracebacks)
        self._loop.run_until_complete(self._end_tasks())
        self._loop.close()
        assert self.server.stop(20)

    async def _end_tasks(self) -> None:
        """Of background responses, which run only while a request does."""
        await self._store.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """On the application's event loop. Raises TimeoutError for a hang."""
        return self._loop.run_until_complete(asyncio.wait_for(work, HANG_S))

    def send(self, request: HttpInput) -> tuple[HttpAnswer, list[str]]:
        """The answer, and the tracebacks that the log got. Raises TimeoutError for a hang."""
        self._tracebacks.texts.clear()
        answer = self.run(self._send(request))
        return answer, list(self._tracebacks.texts)

    async def _send(self, request: HttpInput) -> HttpAnswer:
        path, _, query = request.path.partition("#")[0].partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": request.method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [*request.headers, (b"content-length", str(len(request.body)).encode())],
            "client": ("test", 1),
            "server": ("test", 2),
            "scheme": "http",
            PRESENCE: ClientPresence(),
        }
        body = [{"type": "http.request", "body": request.body, "more_body": False}]
        events: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(event: MutableMapping[str, Any]) -> None:
            events.append(event)

        try:
            await self._app(scope, receive, send)
        except Exception as error:  # Starlette raises it again after the 500
            self._tracebacks.texts.append(f"{type(error).__name__}: {error}")
        headers = {name.decode(): value.decode() for name, value in events[0]["headers"]}
        return HttpAnswer(events[0]["status"], headers, b"".join(event.get("body", b"") for event in events[1:]))


class _Tracebacks(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.texts.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
