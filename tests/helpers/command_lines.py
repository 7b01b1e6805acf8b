"""Runs `llmbackend` in the process of the test."""

from __future__ import annotations

import sys

import pytest

from llmbackend.cli import main as cli
from llmbackend.server import serve
from llmbackend.server.settings import ServerSettings


class CommandLine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: str) -> int:
        """The exit code."""
        self._monkeypatch.setattr(sys, "argv", ["llmbackend", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code is None or isinstance(end.value.code, int)
        return end.value.code or 0

    def refusal(self, *arguments: str) -> str:
        """What is said of a wrong command line."""
        assert self.run(*arguments) == 2
        return self._capsys.readouterr().err

    def refusal_of_flags(self, *flags: str) -> str:
        """What is said of wrong flags of `llmbackend serve`."""
        return self.refusal("serve", *flags)

    def settings(self, *flags: str) -> ServerSettings:
        """What `llmbackend serve` would serve."""
        taken: list[ServerSettings] = []

        def take(settings: ServerSettings) -> int:
            taken.append(settings)
            return 0

        self._monkeypatch.setattr(serve, "run_server", take)
        assert self.run("serve", *flags) == 0
        return taken.pop()


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]
