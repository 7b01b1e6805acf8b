"""`python -m tests.helpers.beating_frontend`: stands for a frontend process, and only says that it is serving."""

from __future__ import annotations

import os
import select
import socket
import sys

import msgspec

from llmbackend.server.frontend_settings import Serving, receive_settings


def main() -> None:
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    receive_settings(channel)
    while True:
        channel.sendall(msgspec.json.encode(Serving()) + b"\n")
        readable, _, _ = select.select([channel], [], [], 0.05)
        if readable and ((message := channel.recv(1000)) == b"" or b"Drain" in message):
            return


if __name__ == "__main__":
    main()
