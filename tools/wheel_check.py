"""`make wheel-check`: checks that an installed wheel serves its demo model in an empty environment and without a
compiler.

For releases. Independent of how the wheel was built. The environment is created in a temporary folder; the server finds
no programs of this machine (PATH contains only the environment). The examples of docs/embedding.md are run there too.
Prints one line per check, and the time from the command to a ready server and to the first answer; exits with 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

from llmbackend.engine.kernels.library import VARIANTS
from tools import smoke
from tools.examples import EXAMPLES

ROOT = Path(__file__).resolve().parent.parent
MYPY = (sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent")
KERNELS = "from llmbackend.engine.kernels import library; print(library.load().variant, library.__file__)"


def check_contents(wheel: Path) -> None:
    """Raises SystemExit for a wheel that lacks something or has too much."""
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {f"llmbackend/engine/kernels/_{variant}.abi3.so" for variant in VARIANTS}
    needed.add("llmbackend/core/c_api/_triton_api.abi3.so")
    needed |= {"llmbackend/py.typed", "llmbackend/demo_repository/demo/1/model.safetensors"}
    if missing := needed - names:
        raise SystemExit(f"FAIL {wheel.name} lacks {', '.join(sorted(missing))}")
    if strange := [
        name for name in names if name.startswith(("tests/", "trials/", "tools/")) or name.endswith((".cpp", ".h"))
    ]:
        raise SystemExit(f"FAIL {wheel.name} has {', '.join(sorted(strange))}")
    if "manylinux" not in wheel.name or "-abi3-" not in wheel.name:
        raise SystemExit(f"FAIL {wheel.name} is for one system or one version of Python alone")
    print(f"ok   {wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def install(wheel: Path, environment: Path, python: str) -> None:
    began_s = time.monotonic()
    subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [str(environment / "bin" / "python"), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    print(f"ok   installed in {time.monotonic() - began_s:.0f} s")


def without_programs(environment: Path, home: Path) -> dict[str, str]:
    """Variables for a process that finds neither a compiler nor what a user's folders hold."""
    return {"PATH": str(environment / "bin"), "HOME": str(home), "LANG": "C.UTF-8"}


def check_kernels(environment: Path, home: Path) -> bool:
    """Whether the wheel's own kernels are loaded on this machine."""
    run = subprocess.run(
        [environment / "bin" / "python", "-c", KERNELS],
        env=without_programs(environment, home),
        cwd=home,
        capture_output=True,
        text=True,
    )
    is_there = run.returncode == 0 and str(environment) in run.stdout
    print(f"{'ok  ' if is_there else 'FAIL'} kernels: {(run.stdout or run.stderr).strip()}")
    return is_there


def check_serving(environment: Path, variables: Mapping[str, str]) -> bool:
    """Twice: the second start finds the packed weights of the first one."""
    llmbackend = str(environment / "bin" / "llmbackend")
    results = []
    for start in ("first", "second"):
        began_s = time.monotonic()
        process, server = smoke.start_server([llmbackend], ["--demo"], variables)
        ready_s = time.monotonic() - began_s
        smoke.curl_generate(server)
        answered_s = time.monotonic() - began_s
        print(f"     {start} start: ready after {ready_s:.1f} s, first answer after {answered_s:.1f} s")
        results.append(smoke.run_check(smoke.log_has_no_complaints, server))
        results.append(smoke.serves(process, server) if start == "first" else smoke.stops_cleanly(process))
    return all(results)


def check_examples(environment: Path, variables: Mapping[str, str]) -> bool:
    """Runs the examples of docs/embedding.md, and has mypy read them as a user's program."""
    python, results = environment / "bin" / "python", []
    for number, example in enumerate(EXAMPLES):
        program = Path(f"example_{number}.py")
        program.write_text(example)
        runs = {
            "runs": subprocess.run([python, program], env=variables, capture_output=True, text=True),
            "is typed": subprocess.run([*MYPY, "--python-executable", python, program], capture_output=True, text=True),
        }
        for what, run in runs.items():
            print(f"{'FAIL' if run.returncode else 'ok  '} {program} {what}")
            if run.returncode:
                print(run.stdout + run.stderr)
        results += [not run.returncode for run in runs.values()]
    return all(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the Python that the environment is made with")
    options = parser.parse_args()
    check_contents(options.wheel)
    with tempfile.TemporaryDirectory(prefix="llmbackend-wheel-") as folder:
        environment, home = Path(folder) / "environment", Path(folder) / "home"
        home.mkdir()
        install(options.wheel.resolve(), environment, options.python)
        os.chdir(home)  # nothing is found in a checkout by chance
        variables = without_programs(environment, home)
        results = [
            check_kernels(environment, home),
            check_serving(environment, variables),
            check_examples(environment, variables),
        ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
