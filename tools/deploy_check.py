"""`make deploy-check`: checks deploy/Containerfile with hadolint, and the manifests with the types of KServe,
Kubernetes and KubeRay.

For changes in deploy/. Independent of what values mean. Invariant: every field of a manifest is a field of its object,
and has its type. The RayCluster is also checked with the schema in KubeRay's own definition, if that can be read:
`--raycluster-crd` names a file or a URL. Runs in an environment with the packages kserve and kubernetes, of which only
the classes generated from their API are imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tools.crd_schema import read_definition, schema_faults

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
RAYCLUSTER_CRD = (
    "https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/ray-operator/config/crd/bases/ray.io_rayclusters.yaml"
)
KINDS = {
    "ServingRuntime": "V1alpha1ServingRuntime",
    "ClusterServingRuntime": "V1alpha1ClusterServingRuntime",
    "InferenceService": "V1beta1InferenceService",
    "RayCluster": "RayCluster",
}
KUBERAY = {
    "RayCluster": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "RayClusterSpec"},
    "RayClusterSpec": {
        "headGroupSpec": "HeadGroupSpec",
        "workerGroupSpecs": "list[WorkerGroupSpec]",
        "rayVersion": "str",
        "enableInTreeAutoscaling": "bool",
        "headServiceAnnotations": "dict(str, str)",
        "suspend": "bool",
    },
    "HeadGroupSpec": {
        "serviceType": "str",
        "headService": "V1Service",
        "enableIngress": "bool",
        "rayStartParams": "dict(str, str)",
        "template": "V1PodTemplateSpec",
    },
    "WorkerGroupSpec": {
        "groupName": "str",
        "replicas": "int",
        "minReplicas": "int",
        "maxReplicas": "int",
        "numOfHosts": "int",
        "rayStartParams": "dict(str, str)",
        "template": "V1PodTemplateSpec",
    },
}
"""The types of the fields in ray.io/v1, for which there is no package: KubeRay's apis/ray/v1/raycluster_types.go."""
REQUIRED = {"HeadGroupSpec": ("rayStartParams", "template"), "RayClusterSpec": ("headGroupSpec",)}
REQUIRED["WorkerGroupSpec"] = ("groupName", "minReplicas", "maxReplicas", *REQUIRED["HeadGroupSpec"])
PLAIN = {"str": str, "bool": bool, "int": int, "float": (int, float), "object": object}
TEXTS = ("ResourceQuantity", "K8sIoApimachineryPkgApiResourceQuantity", "Quantity", "IntOrString")
"""Types that are a text, or a number, in a manifest."""


def kserve_classes() -> ModuleType:
    """kserve.models, without the package's own imports, which are a whole server's."""
    spec = importlib.util.find_spec("kserve")
    assert spec is not None and spec.submodule_search_locations is not None, "install the package kserve"
    package = ModuleType("kserve")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["kserve"] = package
    return importlib.import_module("kserve.models")


class Checker:
    def __init__(self) -> None:
        self._sources = (kserve_classes(), importlib.import_module("kubernetes.client"))

    def faults(self, value: Any, kind: str, place: str) -> Iterator[str]:
        """What is wrong with `value`, which should be a `kind` of the API."""
        if inner := re.fullmatch(r"(?i:list)\[(.*)\]|(?i:dict)[(\[]str, (.*)[)\]]", kind):
            yield from self._faults_inside(value, inner[1] or "", inner[2] or "", place)
        elif kind in PLAIN:
            if not isinstance(value, PLAIN[kind]) or (isinstance(value, bool) and kind == "int"):  # type: ignore[arg-type]
                yield f"{place} is {value!r}, expected {kind}"
        elif kind not in TEXTS:
            yield from self._faults_of_object(value, kind, place)

    def _faults_inside(self, value: Any, item: str, member: str, place: str) -> Iterator[str]:
        expected = list if item else dict
        if not isinstance(value, expected):
            yield f"{place} is {value!r}, expected a {expected.__name__}"
            return
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from self.faults(one, item or member, f"{place}[{key}]")

    def _faults_of_object(self, value: Any, kind: str, place: str) -> Iterator[str]:
        fields = self._fields(kind)
        if not fields or not isinstance(value, dict):
            yield f"{place} is {value!r}, expected {kind}"
            return
        yield from (f"{place}.{name} is missing" for name in REQUIRED.get(kind, ()) if name not in value)
        for name, one in value.items():
            if name in fields:
                yield from self.faults(one, fields[name], f"{place}.{name}")
            else:
                yield f"{place}.{name} is no field of {kind}: {', '.join(sorted(fields))}"

    def _fields(self, kind: str) -> dict[str, str]:
        """Each field's type; none for a kind that nobody knows."""
        if kind in KUBERAY:
            return KUBERAY[kind]
        made = next((getattr(source, kind) for source in self._sources if hasattr(source, kind)), None)
        return {} if made is None else {shown: made.openapi_types[name] for name, shown in made.attribute_map.items()}


def manifest_faults() -> list[str]:
    checker = Checker()
    found: list[str] = []
    for path in sorted(path for folder in ("kserve", "kuberay") for path in (DEPLOY / folder).glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            found += checker.faults(document, KINDS[document["kind"]], path.name)
            print(f"read {path.name}: {document['kind']}")
    return found


def schema_faults_of_ray_cluster(place: str) -> list[str]:
    """place: of KubeRay's definition; "" = its own, and where that is out of reach, it says why nothing is checked."""
    try:
        definition = read_definition(place or RAYCLUSTER_CRD)
    except OSError as error:
        if place:
            return [f"the definition of RayCluster cannot be read at {place}: {error}"]
        print(f"skipped the schema of RayCluster, {error}: {RAYCLUSTER_CRD}; --raycluster-crd names another place")
        return []
    path = DEPLOY / "kuberay" / "ray_cluster.yaml"
    print(f"read {path.name} with the schema at {place or RAYCLUSTER_CRD}")
    return list(schema_faults(yaml.safe_load(path.read_text()), definition, path.name))


def main() -> int:
    parser = argparse.ArgumentParser(description="reads what is in deploy/")
    parser.add_argument("--raycluster-crd", default="", metavar="PLACE", help="file or URL of KubeRay's definition")
    place = parser.parse_args().raycluster_crd
    hadolint = Path(sys.executable).with_name("hadolint")
    is_clean = subprocess.run([hadolint, DEPLOY / "Containerfile"]).returncode == 0
    print(f"read Containerfile: {'ok' if is_clean else 'hadolint has complaints'}")
    found = manifest_faults() + schema_faults_of_ray_cluster(place)
    print(*found, sep="\n")
    return 0 if is_clean and not found else 1


if __name__ == "__main__":
    sys.exit(main())
