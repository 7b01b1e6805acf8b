"""Sends every field to a running server and reports the result for each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.server_process import start_server, stop_server

from .api import Asked
from .fields import APIS
from .models import write_models
from .table import Done, Label, Refused, Row

DONE, REFUSED, LABEL, IGNORED = "supported", "refused", "label", "ignored"


@dataclass(frozen=True)
class Outcome:
    """What came of one field of one endpoint."""

    endpoint: str
    field: str
    kind: str
    """DONE, REFUSED, LABEL, or IGNORED: neither the promised difference nor a refusal."""
    text: str
    """What was promised, why it is refused, or what is wrong."""


@dataclass(frozen=True)
class FieldServer:
    """A server with the bundled model and the mock model, and its access log."""

    client: httpx.Client
    log: Path

    def logged(self, text: str) -> bool:
        return text in self.log.read_text()


@contextlib.contextmanager
def field_server() -> Iterator[FieldServer]:
    with tempfile.TemporaryDirectory() as folder:
        repository, log = Path(folder, "models"), Path(folder, "log")
        write_models(repository)
        with log.open("w") as file:
            try:
                server = start_server("--model-repository", str(repository), "--log-requests=true", log=file)
            except AssertionError as error:
                raise AssertionError(log.read_text()) from error
            try:
                with httpx.Client(base_url=f"http://{server.http}", timeout=60) as client:
                    yield FieldServer(client, log)
            finally:
                stop_server(server)


def field_names() -> list[str]:
    """Of all APIs."""
    return sorted({field for api in APIS for field in api.rows})


def outcomes(
    server: FieldServer, fields: Collection[str], tell: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """One field after the other, in each API that has it."""
    found = []
    for api in APIS:
        asked = api.make(server.client)
        for field in sorted(api.rows.keys() & set(fields)):
            found.append(_outcome(server, asked, field, api.rows[field]))
            tell(found[-1])
    return found


def _outcome(server: FieldServer, api: Asked, field: str, row: Row) -> Outcome:
    try:
        kind, text = _tried(server, api, field, row)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        kind, text = IGNORED, f"an answer is not as promised: {error!r}"
    return Outcome(api.name, field, kind, text)


def _tried(server: FieldServer, api: Asked, field: str, row: Row) -> tuple[str, str]:
    if isinstance(row, Done):
        row.check(api)
        return LABEL if row.is_label else DONE, row.promise
    if isinstance(row, Refused):
        return REFUSED, _refused(api, field, row)
    _check_label(server, api, field, row)
    return LABEL, "shown in the access log"


def _refused(api: Asked, field: str, row: Refused) -> str:
    """The reason. Values that are accepted change nothing."""
    plain = api.texts()
    for value in row.accepted:
        assert api.texts(**{field: value}) == plain, f"{value} is accepted and changes the answer"
    reasons = [api.reason(field, value) for value in row.values]
    return reasons[0]


def _check_label(server: FieldServer, api: Asked, field: str, row: Label) -> None:
    mark: Any = row.value
    assert api.texts(**{field: mark}) == api.texts()
    assert server.logged(f"{api.name} 200 key=- ") and server.logged(f" {row.logged or field}="), (
        "it is not in the access log"
    )
