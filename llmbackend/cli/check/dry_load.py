"""A dry load: a host loads a model as `serve` would, but without instances, so that no weights are read.

For: the command. Does not know: how findings are shown. Invariant: whether a model would load, and why not, is the
host's and the backend's own judgement; nothing is judged here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import StartupError, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions

_LOG = "llmbackend"
_MAX_WARNINGS = 50
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one model.

    name      its name
    version   0 = no version was reached
    reasons   why it would not load, by model: an ensemble's parts, too; empty = it would
    forecast  what its backend says of it
    config    its configuration, completed, as JSON
    warnings  what `serve` would warn of
    """

    name: str
    version: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict)
    forecast: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def check_model(name: str, repository: Path, options: ServerOptions) -> list[Finding]:
    """One finding for each version that would be served, or one that says why none would. options: all but which model
    is loaded, and from where."""
    options = replace(
        options,
        model_repositories=(repository,),
        model_control_mode="explicit",
        startup_models=(name,),
        starts_instances=False,
        exit_on_error=True,
    )
    with _warnings() as warnings:
        server = InferenceServer(options)
        try:
            server.start()
        except StartupError as error:
            return [Finding(name, reasons=error.reasons, warnings=tuple(warnings))]
        except TritonError as error:
            return [Finding(name, reasons={name: error.message}, warnings=tuple(warnings))]
        try:
            return [
                Finding(
                    name, version, {}, forecast, config_to_json(server.model_config(name, version)), tuple(warnings)
                )
                for (served, version), forecast in server.forecasts().items()
                if served == name
            ]
        finally:
            server.stop(_STOP_TIMEOUT_S)


class _Collector(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        if record.levelno == logging.WARNING and len(self._texts) < _MAX_WARNINGS and text not in self._texts:
            self._texts.append(text)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that are logged meanwhile, instead of a log. Errors are in the findings' reasons."""
    texts: list[str] = []
    logger, handler = logging.getLogger(_LOG), _Collector(texts)
    logger.addHandler(handler)
    was_passed_on, logger.propagate = logger.propagate, False
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_passed_on
