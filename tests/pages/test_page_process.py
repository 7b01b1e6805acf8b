"""The life of the page process, as its owner in the server sees it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from llmbackend.frontends.page_proxy import PageProcess, PagesUnavailableError
from tests.helpers.waiting import eventually_async

pytest.importorskip("nicegui")
pytestmark = pytest.mark.slow


def pid_of(pages: PageProcess) -> int | None:
    return None if pages._process is None else pages._process.pid


async def test_it_ends_a_while_after_the_last_connection_and_starts_again() -> None:
    pages = PageProcess(idle_timeout_s=0.2)
    assert pid_of(pages) is None
    first = await pages.connect(Silent)
    second = await pages.connect(Silent)
    pid = pid_of(pages)
    assert pid is not None
    first.close()
    pages.left()
    await asyncio.sleep(0.4)
    assert pid_of(pages) == pid, "one connection is left"
    second.close()
    pages.left()
    await eventually_async(lambda: pid_of(pages) is None and not psutil.pid_exists(pid), 20)
    third = await pages.connect(Silent)
    assert pid_of(pages) not in (None, pid)
    third.close()
    pages.left()
    folder = pages.api_path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    await pages.stop()
    assert pid_of(pages) is None and not folder.exists()
    with pytest.raises(PagesUnavailableError, match="stopping"):
        await pages.connect(Silent)


FULL = """
import sys, tempfile
def full():
    raise FileNotFoundError("No usable temporary directory found")
tempfile._get_default_tempdir = full  # as where every write fails
from llmbackend.pages.main import main
main()
"""


def test_it_serves_where_the_temporary_folder_is_full(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as api, socket.socket(socket.AF_UNIX) as listener:
        api.bind(str(tmp_path / "api.sock"))
        listener.bind(str(tmp_path / "pages.sock"))
        listener.listen()
        arguments = ["--socket-descriptor", str(listener.fileno()), "--api-socket", str(tmp_path / "api.sock")]
        process = subprocess.Popen(
            [sys.executable, "-c", FULL, *arguments], stdin=subprocess.PIPE, pass_fds=(listener.fileno(),)
        )
        with process, socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(str(tmp_path / "pages.sock"))
            client.sendall(b"GET /chat HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200 ")
            assert process.stdin is not None
            process.stdin.close()
        assert process.returncode == 0


class Silent(asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the loop calls it
        self._transport = transport

    def close(self) -> None:
        self._transport.close()
