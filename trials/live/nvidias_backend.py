"""`python -m trials.live.nvidias_backend [--isolated] [PYTEST ARGUMENT ...]`: runs the tests of the python backend and
of caches, then the recorded transcripts, with NVIDIA's libtriton_python.so and libtritoncache_local.so in this host.

Part of `make nvidias-backend`. Independent of which differences are permitted
(tests/backends/nvidias_python_backend.toml). Invariant: exits with 1 if a test fails, or a transcript differs that is
not listed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from .real_triton import RealTriton

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/core/c_api/test_compiled_caches.py", *map(str, sorted(ROOT.glob("tests/backends/test_python_*.py"))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", type=Path, default=ROOT / "build" / "real-triton", help="where it is, or goes")
    parser.add_argument("--isolated", action="store_true", help="each instance in a process of its own")
    arguments, others = parser.parse_known_args()
    triton = RealTriton(arguments.triton)
    triton.install()
    environ = _environ(triton, arguments.isolated)
    tests = [*(others or ("--numprocesses", "2")), *TESTS]
    failed = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environ, check=False).returncode
    if arguments.isolated:  # the transcripts are of instances in the server's process
        return failed
    differ = subprocess.run([sys.executable, "-m", "tests.conformance"], cwd=ROOT, env=environ, check=False).returncode
    return int(bool(failed or differ))


def _environ(triton: RealTriton, isolated: bool) -> dict[str, str]:
    """Without PYTHONDONTWRITEBYTECODE, since the recorded server wrote some."""
    environ = os.environ | triton.libraries | {"LLMBACKEND_TRITON_BACKENDS": str(triton.backends)}
    environ["LLMBACKEND_TRITON_CACHES"] = str(triton.root / "dist" / "caches")
    if isolated:
        environ["LLMBACKEND_TRITON_ISOLATED"] = "1"
    return environ


if __name__ == "__main__":
    sys.exit(main())
