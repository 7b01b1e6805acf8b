"""One question over every protocol, by clients as users have them, unmodified.

Invariant: the question has no near tie in SmolLM2's answer, which is therefore the same with every kernel library.
"""

from __future__ import annotations

import json
from typing import Any, Final

import anthropic
import openai

from tests.helpers.grpc_streams import GrpcStream
from tests.helpers.server_process import ServerProcess, post

QUESTION: Final = [{"role": "user", "content": "What is the capital of Japan?"}]
_PARAMETERS: Final = {"max_tokens": 24, "temperature": 0}


def answers(server: ServerProcess, model: str) -> dict[str, str]:
    """By protocol."""
    assert server.get("/v2/health/ready") == server.get(f"/v2/models/{model}/ready") == ""
    assert "messages" in {tensor["name"] for tensor in json.loads(server.get(f"/v2/models/{model}"))["inputs"]}
    return {
        "generate": _generate(server, model),
        "generate_stream": _generate_stream(server, model),
        "gRPC stream": _grpc_stream(server, model),
        "chat": chat(server, model),
        "chat stream": _chat_stream(server, model),
        "responses": _responses(server, model),
        "messages": _messages(server, model),
    }


def openai_client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none")


def chat(server: ServerProcess, model: str, question: str = QUESTION[0]["content"], **options: Any) -> str:
    with openai_client(server) as client:
        ask: Any = client.chat.completions.create
        asked = [{"role": "user", "content": question}]
        return str(ask(model=model, messages=asked, **_PARAMETERS | options).choices[0].message.content)


def _chat_stream(server: ServerProcess, model: str) -> str:
    with openai_client(server) as client:
        ask: Any = client.chat.completions.create
        chunks = ask(model=model, messages=QUESTION, **_PARAMETERS, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _generate(server: ServerProcess, model: str) -> str:
    status, text = post(server, f"/v2/models/{model}/generate", _body())
    assert status == 200, text
    return str(json.loads(text)["text_output"])


def _generate_stream(server: ServerProcess, model: str) -> str:
    status, text = post(server, f"/v2/models/{model}/generate_stream", {**_body(), "stream": True})
    assert status == 200, text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    return "".join(event["text_output"] for event in events)


def _body() -> dict[str, Any]:
    return {"messages": json.dumps(QUESTION), "parameters": _PARAMETERS}


def _grpc_stream(server: ServerProcess, model: str) -> str:
    stream = GrpcStream(server.grpc, model, json.dumps(QUESTION), _PARAMETERS, prompt_input="messages").finish()
    assert stream.error is None
    return stream.text


def _responses(server: ServerProcess, model: str) -> str:
    with openai_client(server) as client:
        ask: Any = client.responses.create
        return str(ask(model=model, input=QUESTION, max_output_tokens=24, temperature=0).output_text)


def _messages(server: ServerProcess, model: str) -> str:
    with anthropic.Anthropic(base_url=f"http://{server.http}", api_key="none") as client:
        ask: Any = client.messages.create
        return str(ask(model=model, messages=QUESTION, max_tokens=24, extra_body={"temperature": 0}).content[0].text)
