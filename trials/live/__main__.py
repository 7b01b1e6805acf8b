"""`python -m trials.live [--only REGEX] [--seed N]`: sends the same requests to a real Triton and to this server with
the same models, and reports every difference visible to clients.

Part of `make conformance-live`. Independent of models and protocols. Invariant: exits with 1 if a difference is not
listed in by_design.toml with its reason, or a listed one is no longer needed; the last line says how many cases match.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.server_process import start_server, stop_server

from .by_design import Rule, read_rules
from .case import Case, Server
from .cases import all_cases
from .real_triton import RealTriton
from .together import cases_at_the_end, cases_together

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHOWN_CHARACTERS = 240
LONG_LINES = 12
FLAGS = (
    "--model-control-mode=explicit",
    "--load-model=*",
    "--exit-on-error=false",
    "--cache-config=local,size=1048576",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", type=Path, default=ROOT / "build" / "real-triton", help="where it is, or goes")
    parser.add_argument("--only", default="", help="regular expression of case names; the rest is not sent")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    triton = RealTriton(arguments.triton)
    triton.install()
    cases = [*all_cases(arguments.seed), *cases_together(), *cases_at_the_end()]
    wanted = [case for case in cases if re.search(arguments.only, case.name)]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        with _triton(triton, scratch) as theirs, _ours(scratch) as ours:
            answers = [(case, _answer(case, theirs), _answer(case, ours)) for case in wanted]
    return report(answers, read_rules(HERE / "by_design.toml"), is_partial=bool(arguments.only))


def _answer(case: Case, server: Server) -> str:
    try:
        answer = case.send(server)
    except Exception as error:  # it is a difference, if only one of them does this
        answer = f"{type(error).__name__}: {error}"
    return answer.replace(server.http_address, "@HTTP@").replace(str(server.repository), "@MODELS@")


@contextlib.contextmanager
def _triton(triton: RealTriton, scratch: Path) -> Iterator[Server]:
    repository = _copy_of_models(scratch / "theirs")
    with triton.running(repository, *FLAGS, log=scratch / "triton.log") as running:
        server = Server("Triton", repository, running.http, running.grpc, running.metrics)
        with contextlib.closing(server):
            yield server


@contextlib.contextmanager
def _ours(scratch: Path) -> Iterator[Server]:
    repository = _copy_of_models(scratch / "ours")
    with (scratch / "ours.log").open("w") as log:
        process = start_server("--model-repository", str(repository), *FLAGS, log=log)
    server = Server("llmbackend", repository, process.http, process.grpc, process.metrics)
    try:
        yield server
    finally:
        server.close()
        stop_server(process)


def _copy_of_models(target: Path) -> Path:
    """The models, and `sequence_oldest`: `sequence_direct` with the other strategy."""
    shutil.copytree(HERE / "models", target, ignore=shutil.ignore_patterns("__pycache__", "ruff.toml"))
    shutil.copytree(target / "sequence_direct", target / "sequence_oldest")
    config = target / "sequence_oldest" / "config.pbtxt"
    config.write_text(config.read_text().replace("direct { }", "oldest { max_candidate_sequences: 4 }"))
    return target


def report(answers: Sequence[tuple[Case, str, str]], rules: Sequence[Rule], is_partial: bool) -> int:
    """Prints what differs; the exit code."""
    by_design: Counter[str] = Counter()
    unexplained = 0
    for case, theirs, ours in answers:
        if theirs == ours:
            continue
        applied = [rule for rule in rules if rule.cases.search(case.name)]
        both = theirs, ours
        for rule in applied:
            before, both = both, rule.apply(*both)
            by_design[rule.name] += before != both
        if both[0] != both[1]:
            unexplained += 1
            _print_difference(case.name, *both)
    matching = sum(theirs == ours for _, theirs, ours in answers)
    reasons = {rule.name: rule.reason for rule in rules}
    for name, reason in reasons.items():
        if by_design[name]:
            print(f"by design: {name}, {by_design[name]} cases: {reason}")
        elif not is_partial:
            unexplained += 1
            print(f"stale: {name} is needed by no case")
    print(f"{len(answers) - matching} cases differ, {unexplained} of them unexplained")
    print(f"conformance-live: {matching} of {len(answers)} match")
    return 1 if unexplained else 0


def _print_difference(name: str, theirs: str, ours: str) -> None:
    """The lines that differ, each from a little before the first character that does."""
    print(f"=== {name}")
    if max(theirs.count("\n"), ours.count("\n")) > LONG_LINES:
        changes = difflib.unified_diff(theirs.splitlines(), ours.splitlines(), "Triton", "ours", lineterm="", n=0)
        print("\n".join(f"    {line[:SHOWN_CHARACTERS]}" for line in changes))
        return
    for their_line, our_line in itertools.zip_longest(theirs.splitlines(), ours.splitlines(), fillvalue="(no line)"):
        if their_line != our_line:
            start = max(_common_characters(their_line, our_line) - 60, 0)
            print(f"    Triton {'…' if start else ''}{their_line[start : start + SHOWN_CHARACTERS]}")
            print(f"    ours   {'…' if start else ''}{our_line[start : start + SHOWN_CHARACTERS]}")


def _common_characters(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


if __name__ == "__main__":
    sys.exit(main())
