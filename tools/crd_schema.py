"""The schema of a Kubernetes custom resource, checked in the way the API server checks objects.

Part of `make deploy-check`. Independent of which resources exist. Invariant: whatever the API server would refuse is a
fault, and so is a field that it would silently drop.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from jsonschema import Draft202012Validator, ValidationError, validators

_TIMEOUT_S: Final = 20.0
_OPEN: Final = ("additionalProperties", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource")


def read_definition(place: str) -> Any:
    """The CustomResourceDefinition in a file, or at a URL. Raises OSError where there is none."""
    if "://" not in place:
        return yaml.safe_load(Path(place).read_text())
    with urllib.request.urlopen(place, timeout=_TIMEOUT_S) as answer:
        return yaml.safe_load(answer)


def schema_faults(document: Any, definition: Any, place: str) -> Iterator[str]:
    """What is wrong with an object that says it is one of `definition`."""
    group, names = definition["spec"]["group"], definition["spec"]["names"]
    versions = {f"{group}/{one['name']}": one for one in definition["spec"]["versions"] if one["served"]}
    if document["kind"] != names["kind"] or document["apiVersion"] not in versions:
        known = ", ".join(versions)
        yield f"{place} is a {document['kind']} of {document['apiVersion']}, expected {names['kind']} of {known}"
        return
    schema = _strict(versions[document["apiVersion"]]["schema"]["openAPIV3Schema"])
    for error in _Validator(schema).iter_errors(document):
        yield f"{place}{error.json_path.removeprefix('$')}: {error.message}"


def _strict(schema: Any) -> Any:
    """With no other fields than those it names, which the API server would drop; null where it allows null."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _strict(one) for name, one in schema.items() if name not in ("properties", "default", "enum")}
    made |= {name: schema[name] for name in ("default", "enum") if name in schema}
    if "properties" in schema:
        made["properties"] = {name: _strict(one) for name, one in schema["properties"].items()}
        if not any(name in schema for name in _OPEN):
            made["additionalProperties"] = False
    return {"anyOf": [{"type": "null"}, made]} if schema.get("nullable") else made


def _distinct_keys(_: Any, keys: list[str], items: Any, schema: Any) -> Iterator[ValidationError]:
    """Entries of a list that Kubernetes treats as a map differ in the fields that are its keys."""
    if not isinstance(items, list):
        return
    defaults = {name: one.get("default") for name, one in schema["items"]["properties"].items()}
    seen = set()
    for item in items:
        key = tuple((item.get(name, defaults[name])) for name in keys) if isinstance(item, dict) else ()
        if key in seen:
            yield ValidationError(f"two entries have the same {', '.join(keys)}: {key}")
        seen.add(key)


_Validator = validators.extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _distinct_keys})
