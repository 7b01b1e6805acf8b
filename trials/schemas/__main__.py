"""`make schemas`: thousands of generated and public schemas. Exits with a non-zero status on a wrong verdict."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.helpers.byte_grammars import compiler

from .families import schemas
from .suites import models, test_suite
from .verdict import Instances, Tally, judge

_PACKAGES = ("openai.types", "openai_harmony")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=80, help="schemas of each family")
    parser.add_argument("--walks", type=int, default=3, help="texts of each schema")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=300, help="at most so many models of packages, drawn by the seed")
    parser.add_argument("--directory", type=Path, default=Path("build/schemas"), help="where the test suite is kept")
    parser.add_argument("--not-strict", action="store_true", help="schemas without what is not enforced of them")
    parser.add_argument("--only", choices=("families", "suite", "models"))
    arguments = parser.parse_args()
    wrong = 0
    if arguments.only in (None, "families"):
        generated = ((name, schema, ()) for name, schema in schemas(arguments.count, arguments.seed))
        wrong += _run("families", generated, arguments)
    if arguments.only in (None, "suite"):
        suite = ((case.name, case.schema, case.instances) for case in test_suite(arguments.directory))
        wrong += _run("JSON Schema Test Suite", suite, arguments)
    if arguments.only in (None, "models"):
        cases = [case for package in _PACKAGES for case in models(package)]
        drawn = random.Random(arguments.seed).sample(cases, min(arguments.models, len(cases)))
        found = ((case.name, case.schema, ()) for case in drawn)
        wrong += _run("models of packages", found, arguments)
    return 1 if wrong else 0


def _run(title: str, cases: Iterable[tuple[str, Any, Instances]], arguments: argparse.Namespace) -> int:
    used, tally, begin = compiler(), Tally(), time.monotonic()
    for name, schema, instances in cases:
        before = len(tally.wrong_verdicts)
        judge(
            used,
            schema,
            random.Random(f"{name} {arguments.seed}"),
            tally,
            walks=arguments.walks,
            instances=instances,
            is_strict=not arguments.not_strict,
        )
        for verdict in tally.wrong_verdicts[before:]:
            print(f"WRONG {name}: {verdict}", flush=True)
    print(f"{title}: {tally} ({time.monotonic() - begin:.0f} s)", flush=True)
    return len(tally.wrong_verdicts)


if __name__ == "__main__":
    sys.exit(main())
