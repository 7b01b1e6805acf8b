"""The tests of the kernels, on the device in place of Triton's interpreter.

    python -m benchmarks.accelerator.kernel_tests --device cuda --json FILE --scratch FOLDER

For: kernels other than attention and products, and odd sizes of all. Does not know: what the tests check. Invariants:
only the conftest files beside the tests are read, since the one above them needs a whole server's packages; warnings,
which another version of torch may give, fail nothing; each failed test is named in the results.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from .section import WORKERS, Section, run_alone

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = [
    f"tests/engine/gpu/test_{name}.py"
    for name in ("fused_kernels", "paged_attention", "invariant_matmul", "device_sampler")
]
"""Those that run on a GPU as well (tests/helpers/gpu/kernel_device.py)."""
FEW = ["tests/engine/gpu/test_fused_kernels.py", "-k", "test_embed"]


def measure(section: Section) -> None:
    report = section.scratch / "tests.xml"
    on_device = {"LLMBACKEND_TEST_DEVICE": section.device} if section.on_gpu else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/engine"]
    command += ["-o", "filterwarnings=default", "-o", "timeout=300", f"--junitxml={report}"]
    if section.on_gpu and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(WORKERS)]
    subprocess.run([*command, *(FILES if section.on_gpu else FEW)], cwd=ROOT, env={**os.environ, **on_device})
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [f"{test.get('classname')}::{test.get('name')}" for test in tests if _has(test, "failure", "error")]
    skipped = sum(_has(test, "skipped") for test in tests)
    section.add(measure="tests", passed=len(tests) - len(failed) - skipped, skipped=skipped, failed=failed)
    section.fail(failed if tests else ["no test ran"])


def _has(test: ElementTree.Element, *tags: str) -> bool:
    return any(test.find(tag) is not None for tag in tags)


if __name__ == "__main__":
    run_alone("kernel_tests", measure)
