"""Python packages missing on a GPU machine without a network: downloaded here as wheels, unpacked there.

Used by benchmarks/gpu.py. Independent of what the sections import. Invariants: wheels are for Python 3.12 on x86-64, in
the versions of constraints.txt; nothing is installed there; llmbackend itself, including its backends, is found as if
installed, although only its source tree is there.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

PYTHON = "3.12"
MISSING = (
    "annotated-doc", "annotated-types", "execnet", "fastapi", "google-re2", "grpcio", "grpcio-health-checking",
    "httptools", "llguidance", "msgspec", "opentelemetry-api", "orjson", "prometheus_client", "protobuf", "psutil",
    "pydantic", "pydantic_core", "pytest-timeout", "pytest-xdist", "python-rapidjson", "pyzmq", "sse-starlette",
    "starlette", "tritonclient", "typing-inspection", "typing_extensions", "uvicorn", "uvloop",
)  # fmt: skip
"""Beside torch, triton, transformers with what it needs (numpy, jinja2, typer, rich) and pytest, which are there;
grpcio and protobuf may be, too, but must be as new as what was generated for them."""
_OLDEST_GLIBC, _NEWEST_GLIBC = 17, 39


def download(folder: Path, root: Path) -> None:
    """About 25 MB. Raises CalledProcessError with pip's words on stderr."""
    # pip takes a wheel for exactly the systems that it is told.
    systems = [f"manylinux_2_{minor}_x86_64" for minor in range(_OLDEST_GLIBC, _NEWEST_GLIBC + 1)]
    platforms = [f"--platform={system}" for system in (*systems, "manylinux2014_x86_64", "manylinux1_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    command += [f"--constraint={root / 'constraints.txt'}", f"--dest={folder}", *MISSING]
    subprocess.run(command, check=True)


def unpack(folder: Path, target: Path) -> None:
    """Wheels of `folder` side by side, as pip installs them; scripts and headers are left out."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (place := _place(name)) and not name.endswith("/"):
                    (target / place).parent.mkdir(parents=True, exist_ok=True)
                    (target / place).write_bytes(archive.read(name))


def _place(name: str) -> str:
    """Where a file of a wheel belongs; "" for one that is not needed."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    kind, _, inner = rest.partition("/")
    return inner if kind in ("purelib", "platlib") else ""


def describe_project(root: Path, target: Path) -> None:
    """The entry points of pyproject.toml, where Python looks for those of installed packages."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    described = target / f"{project['name']}-{project['version']}.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    entries = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items()) for group, names in groups
    ]
    (described / "entry_points.txt").write_text("\n".join(entries))
