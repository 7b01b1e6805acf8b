"""Limits an editable installation to the native kernels that this CPU can execute.

Everything else about the package stands in pyproject.toml. A wheel contains the kernels of every instruction set; a
checkout is run where it was built, and each library takes a minute to compile.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPUINFO = Path("/proc/cpuinfo")
KERNELS = "llmbackend.engine.kernels._"
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
REQUIRED_FLAGS = {
    "avx2": {"avx2", "fma", "bmi2"},
    "avx_vnni": {"avx_vnni"},
    "avx512": AVX512,
    "avx512_vnni": AVX512 | {"avx512_vnni"},
    "avx512_bf16": AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx": {"amx_tile", "amx_int8", "amx_bf16"},
}
"""As Linux names them."""


def cpu_flags() -> set[str] | None:
    """Of the first processor; None: unknown, for example because this is not Linux on x86-64."""
    found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE) if CPUINFO.exists() else None
    return set(found[1].split()) if found else None


class BuildExt(build_ext):
    def run(self) -> None:
        flags = cpu_flags()
        if self.editable_mode and flags is not None:
            self.extensions = [extension for extension in self.extensions if _runs_with(flags, extension)]
        super().run()


def _runs_with(flags: set[str], extension: Extension) -> bool:
    return REQUIRED_FLAGS.get(extension.name.removeprefix(KERNELS), set()) <= flags


setup(cmdclass={"build_ext": BuildExt})
