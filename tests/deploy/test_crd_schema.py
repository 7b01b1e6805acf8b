"""A custom resource is checked with its own definition: what the API server refuses or drops is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.crd_schema import read_definition, schema_faults

DEFINITION = """
spec:
  group: tests.example
  names: { kind: Boat }
  versions:
    - name: v0
      served: false
    - name: v1
      served: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: { type: string }
            kind: { type: string }
            metadata: { type: object }
            spec:
              type: object
              required: [ name ]
              properties:
                name: { type: string }
                flag: { type: string, nullable: true }
                length:
                  anyOf: [ { type: integer }, { type: string } ]
                  pattern: ^[0-9]+m$
                  x-kubernetes-int-or-string: true
                cargo: { type: object, x-kubernetes-preserve-unknown-fields: true }
                labels: { type: object, additionalProperties: { type: string } }
                doors:
                  type: array
                  x-kubernetes-list-type: map
                  x-kubernetes-list-map-keys: [ number, side ]
                  items:
                    type: object
                    properties:
                      number: { type: integer }
                      side: { type: string, default: left }
"""


def faults(spec: Any, **other: Any) -> list[str]:
    boat = {"apiVersion": "tests.example/v1", "kind": "Boat", "metadata": {"name": "x"}, "spec": spec}
    return list(schema_faults(boat | other, yaml.safe_load(DEFINITION), "boat.yaml"))


def test_what_the_api_server_accepts_has_no_faults() -> None:
    doors = [{"number": 1}, {"number": 1, "side": "right"}]
    rest: Any = {"flag": None, "cargo": {"anything": [1]}, "labels": {"any": "name"}, "doors": doors}
    assert faults({"name": "x", "length": "12m"} | rest) == []
    assert faults({"name": "x", "length": 12}) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"nam": "x", "name": "x"}, "boat.yaml.spec: Additional properties are not allowed ('nam' was unexpected)"),
        ({}, "boat.yaml.spec: 'name' is a required property"),
        ({"name": 1}, "boat.yaml.spec.name: 1 is not of type 'string'"),
        ({"name": None}, "boat.yaml.spec.name: None is not of type 'string'"),
        ({"name": "x", "length": "long"}, "boat.yaml.spec.length: 'long' does not match '^[0-9]+m$'"),
        ({"name": "x", "labels": {"a": 1}}, "boat.yaml.spec.labels.a: 1 is not of type 'string'"),
        (
            {"name": "x", "doors": [{"number": 1}, {"number": 1, "side": "left"}]},
            "boat.yaml.spec.doors: two entries have the same number, side: (1, 'left')",
        ),
    ],
)
def test_a_fault_is_named_with_its_place(spec: Any, said: str) -> None:
    assert faults(spec) == [said]


def test_only_versions_that_are_served_are_known() -> None:
    (said,) = faults({"name": "x"}, apiVersion="tests.example/v0")
    assert said == "boat.yaml is a Boat of tests.example/v0, expected Boat of tests.example/v1"


def test_a_definition_is_read_from_a_file_or_a_url(tmp_path: Path) -> None:
    (file := tmp_path / "boat.yaml").write_text(DEFINITION)
    assert read_definition(str(file)) == read_definition(file.as_uri()) == yaml.safe_load(DEFINITION)
    with pytest.raises(OSError):
        read_definition(str(tmp_path / "none.yaml"))
