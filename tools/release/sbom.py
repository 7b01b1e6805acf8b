"""`python -m tools.release.sbom FILE`: writes dist/llmbackend-VERSION.cdx.json, the bill of materials of a release.

Part of `make sbom`. FILE is the output of cyclonedx-py for the test environment, which has all extras; packages that
only tests need are left out here. Invariant: it contains every package of an installation with all extras, with its
version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from llmbackend import __version__
from tools.release.dependencies import PACKAGE, closure

DIST: Final = Path(__file__).resolve().parents[2] / "dist"


def without_others(bom: dict[str, Any], packages: Collection[str]) -> dict[str, Any]:
    """The bill of `packages` alone, and of what depends on what among them. Raises KeyError for a missing one."""
    components: dict[str, Any] = {canonicalize_name(each["name"]): each for each in bom["components"]}
    kept = [components[name] for name in packages]
    root = bom["metadata"]["component"]["bom-ref"]
    refs = {each["bom-ref"] for each in kept} | {root}
    dependencies = [
        each | {"dependsOn": sorted(ref for ref in each.get("dependsOn", ()) if ref in refs)}
        for each in bom["dependencies"]
        if each["ref"] in refs
    ]
    return bom | {"components": kept, "dependencies": dependencies}


def main() -> int:
    bom = without_others(json.loads(Path(sys.argv[1]).read_text()), closure())
    root = bom["metadata"]["component"]
    if (root["name"], root["version"]) != (PACKAGE, __version__):
        print(f"the bill is of {root['name']} {root['version']}, expected {PACKAGE} {__version__}")
        return 1
    written = DIST / f"{PACKAGE}-{__version__}.cdx.json"
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(bom, indent=1) + "\n")
    print(f"{written.name}: {bom['specVersion']}, {len(bom['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
