"""`python -m trials.fuzz [--seconds 600] [--seed 0] [--only WORD]`: hostile input on every interface, for a bounded
time.

Prints one row per target and, for each finding, its smallest input; the last line is `fuzz: N inputs, M failures`.
Exits with 1 if something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from llmbackend.core.errors import TritonError

from .bystanders import Bystanders
from .configurations import CONFIG_INPUTS, ConfigInput, ConfigReader
from .fuzzed_server import HANG_S, FuzzedServer, running
from .grpc_inputs import GRPC_INPUTS, RAW_GRPC_INPUTS
from .grpc_target import GrpcTarget, RawGrpcTarget
from .http_inputs import HTTP_INPUTS
from .http_target import RAW_HTTP_INPUTS, HttpTarget, RawHttpTarget
from .openapi_target import run_schemathesis
from .parser_target import run_parsers
from .tally import KINDS, Finding, Input, Tally, drive

Target = Callable[[float], Tally]
"""Runs for so many seconds."""
_SHARES = {"OpenAPI": 8.0, "parsers": 6.0, "raw HTTP": 2.0, "gRPC": 4.0, "raw gRPC": 1.5}
"""Of the time; other targets have a share of 1."""


def main() -> int:
    options = _options()
    logging.disable(logging.CRITICAL)  # the configurations that are read here log their refusals
    reports = Path(tempfile.mkdtemp(prefix="llmbackend-fuzz-report-"))
    with running() as fuzzed, Bystanders(fuzzed, options.seed) as beside:
        tallies = list(_run_all(_targets(fuzzed, reports, options.seed), options))
        server_log = reports / "server.log"
        server_log.write_bytes(fuzzed.log_path.read_bytes())
    return _report(tallies, beside, reports)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trials.fuzz")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose name holds this")
    return parser.parse_args()


def _targets(fuzzed: FuzzedServer, reports: Path, seed: int) -> dict[str, Target]:
    targets: dict[str, Target] = {"OpenAPI": lambda seconds: run_schemathesis(fuzzed, reports, seconds, seed)}
    for name, inputs in HTTP_INPUTS.items():
        targets[name] = _driving(name, inputs, lambda: HttpTarget(fuzzed), seed)
    targets["raw HTTP"] = _driving("raw HTTP", RAW_HTTP_INPUTS, lambda: RawHttpTarget(fuzzed), seed)
    targets["gRPC"] = lambda seconds: _grpc(fuzzed, seconds, seed)
    targets["raw gRPC"] = _driving("raw gRPC", RAW_GRPC_INPUTS, lambda: RawGrpcTarget(fuzzed), seed)
    targets["parsers"] = lambda seconds: run_parsers(seconds, seed)
    reader = ConfigReader(reports / "models")
    for name, configurations in CONFIG_INPUTS.items():
        targets[name] = _driving(name, configurations, lambda: functools.partial(_read_configuration, reader), seed)
    return targets


def _driving(
    name: str, inputs: st.SearchStrategy[Input], make_run: Callable[[], Callable[[Input], None]], seed: int
) -> Target:
    return lambda seconds: drive(name, inputs, make_run(), seconds, seed)


def _grpc(fuzzed: FuzzedServer, seconds: float, seed: int) -> Tally:
    with contextlib.closing(GrpcTarget(fuzzed)) as target:
        return drive("gRPC", GRPC_INPUTS, target, seconds, seed)


def _read_configuration(reader: ConfigReader, given: ConfigInput) -> None:
    began_s = time.monotonic()
    with contextlib.suppress(TritonError):
        reader.read(given)
    if time.monotonic() - began_s > HANG_S:
        raise Finding("hang", f"took {time.monotonic() - began_s:.0f} s")


def _run_all(targets: dict[str, Target], options: argparse.Namespace) -> Iterator[Tally]:
    chosen = {name: run for name, run in targets.items() if options.only.lower() in name.lower()}
    began_s = time.monotonic()
    total = sum(_SHARES.get(name, 1.0) for name in chosen)
    for name, run in chosen.items():
        tally = run(options.seconds * _SHARES.get(name, 1.0) / total)
        at_s = time.monotonic() - began_s
        print(f"{at_s:5.0f} s  {tally.target}: {tally.inputs} inputs, {len(tally.findings)} findings", flush=True)
        yield tally


def _report(tallies: list[Tally], beside: Tally, reports: Path) -> int:
    table = Table("target", "inputs", *KINDS)
    rows = [*tallies, beside]
    for tally in rows:
        table.add_row(tally.target, str(tally.inputs), *(str(tally.count(kind)) for kind in KINDS))
    Console().print(table)
    failures = [(tally.target, *finding) for tally in rows for finding in tally.findings]
    for target, kind, text, given in failures:
        print(f"\n{target}: {kind}: {text}\n  input: {given}")
    if failures:
        print(f"\nreports: {reports}")
    print(f"fuzz: {sum(tally.inputs for tally in tallies)} inputs, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
