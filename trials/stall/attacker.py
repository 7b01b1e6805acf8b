"""The process that sends attacks: prepares the body first and sends the request when told to.

Used by the run. Independent of bystanders. Invariant: a body is prepared before its measurement starts, and only the
beginning of an answer is kept.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc

from trials.fuzz.exchange import HttpAnswer, HttpInput, complaint

from .attacks import BY_NAME
from .attacks.attack import GrpcSent, HttpSent, Sent
from .served import KEY
from .worker import messages

SHOWN_CHARACTERS = 60
_AUTHORIZATION = ("authorization", f"Bearer {KEY}")
_SERVICE = "/inference.GRPCInferenceService/"
_WHOLE_BYTES = 64 << 10
"""Of an answer; errors are shorter."""
_IMPROPER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True)
class Answer:
    """`complaint`: what is wrong with it, "" if nothing."""

    text: str
    complaint: str = ""


def main(parent: Connection, http_address: str, grpc_address: str, size: int, timeout_s: float) -> None:
    """Is told a name, says "ready", is told "go", says the Answer."""
    sender = _Sender(http_address, grpc_address, timeout_s)
    for name in messages(parent):
        attack = BY_NAME[name]
        sent = attack.sent(size, sender.post)
        parent.send("ready")
        assert parent.recv() == "go"
        answers = [sender.send(each, attack.expected) for each in sent]
        wrong = next((answer for answer in answers if answer.complaint), None)
        parent.send(wrong or max(answers, key=lambda answer: len(answer.text)))


class _Sender:
    def __init__(self, http_address: str, grpc_address: str, timeout_s: float) -> None:
        self._http, self._grpc, self._timeout_s = http_address, grpc_address, timeout_s

    def send(self, sent: Sent, expected: str) -> Answer:
        try:
            return self._over_http(sent, expected) if isinstance(sent, HttpSent) else self._over_grpc(sent)
        except (OSError, http.client.HTTPException) as error:
            return Answer(repr(error), f"no answer: {error!r}")
        finally:
            if isinstance(sent, HttpSent) and sent.closes is not None:
                sent.closes()

    def post(self, path: str, body: object) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._http, timeout=self._timeout_s)
        with contextlib.closing(connection):
            headers = dict([("content-type", "application/json"), _AUTHORIZATION])
            connection.request("POST", path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            text = response.read()
        assert response.status == 200, text[:300]
        document: dict[str, Any] = json.loads(text)
        return document

    def _over_http(self, sent: HttpSent, expected: str) -> Answer:
        if sent.connections:
            return self._in_chunks(sent, expected)
        connection = http.client.HTTPConnection(self._http, timeout=self._timeout_s)
        with contextlib.closing(connection):
            headers = dict([("content-type", "application/json"), _AUTHORIZATION]) | sent.headers
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the body was whole
                connection.request(sent.method, sent.path, sent.body, headers)
            response = connection.getresponse()
            start = response.read(_WHOLE_BYTES)
            while response.read(1 << 20):
                pass
        answer = HttpAnswer(response.status, {k.lower(): v for k, v in response.getheaders()}, start)
        found, text = complaint(HttpInput(sent.path, b"", method=sent.method), answer), start.decode(errors="replace")
        if not found and not re.search(expected, f"{response.status} {text}"):
            found = f"expected {expected!r}, answered {response.status} {text}"
        return Answer(_shown(response.status, text), found)

    def _in_chunks(self, sent: HttpSent, expected: str) -> Answer:
        """What the first of the connections is answered first."""
        head = f"{sent.method} {sent.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"{': '.join(_AUTHORIZATION)}\r\n" if sent.has_key else ""
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in sent.body)
        request = b"%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (head.encode(), body)
        with ThreadPoolExecutor(sent.connections) as pool:
            statuses = list(pool.map(self._status_of, [3 * request] * sent.connections))
        wrong = next((line for line in statuses if not re.search(expected, line)), "")
        return Answer(statuses[0], f"expected {expected!r}, answered {wrong!r}" if wrong else "")

    def _status_of(self, requests: bytes) -> str:
        host, _, port = self._http.partition(":")
        with socket.create_connection((host, int(port)), timeout=self._timeout_s) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the bodies were whole
                connection.sendall(requests)
            with connection.makefile("rb") as answers:
                return answers.readline().decode().partition(" ")[2].strip()

    def _over_grpc(self, sent: GrpcSent) -> Answer:
        how = grpc.Compression.Gzip if sent.gzip else grpc.Compression.NoCompression
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(self._grpc, options=unlimited) as channel:
            try:
                if sent.is_stream:
                    call: Any = channel.stream_stream(_SERVICE + sent.rpc)
                    responses = call(
                        _once(sent.message), timeout=self._timeout_s, compression=how, metadata=[_AUTHORIZATION]
                    )
                    first = next(responses, b"")
                    return Answer(_shown("OK", first[:200].decode(errors="replace")))
                unary: Any = channel.unary_unary(_SERVICE + sent.rpc)
                answered = unary(sent.message, timeout=self._timeout_s, compression=how, metadata=[_AUTHORIZATION])
                return Answer(f"OK ({len(answered)} bytes)")
            except grpc.RpcError as error:
                code = error.code()
                found = f"{code.name}: {error.details()}" if code in _IMPROPER else ""
                return Answer(_shown(code.name, error.details() or ""), found)


def _once(message: bytes) -> Iterator[bytes]:
    yield message


def _shown(status: object, text: str) -> str:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return f"{status} {printable}"[:SHOWN_CHARACTERS]
