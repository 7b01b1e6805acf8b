"""All checks and measurements that need a GPU, in five parts of less than ten minutes: `python benchmarks/gpu.py`.

    python benchmarks/gpu.py --download .gpu-packages          with a network: what the machine lacks
    python benchmarks/gpu.py --part 1 --packages .gpu-packages --out results        on a machine with one GPU
    python benchmarks/gpu.py --part 4 --before results --packages .gpu-packages --out after
    python benchmarks/gpu.py --part 1 --device cpu --out trial      tries the benchmark itself, with tiny shapes

For docs/gpu.md and changes of the accelerator path. Independent of what is measured; the sections are programs in
benchmarks/accelerator/. Invariants: each part is useful alone; a section has a time limit, and one that is cut, fails
or hangs does not affect the others; results are on disk line by line, the page and the packed logs after every section,
so that an interrupted run keeps its results; a part produces three files; the exit code is 1 if anything failed.

Parts: 1 does it start, and where does the time of an 8B model go? 2 is everything right? 3 faults, servers and other
models. 4 the same again after a change, compared with --before. 5 what can wait. Where an engine does not work at all,
the sections behind, and the parts behind, are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.accelerator import packages, parts, report  # noqa: E402
from benchmarks.accelerator.comparison import comparison  # noqa: E402
from benchmarks.accelerator.device_memory import DeviceMemory, used_bytes  # noqa: E402
from benchmarks.accelerator.running import Results, Runner, forks_work, read_lines  # noqa: E402

IMPORTED = ("torch", "transformers.models.auto.modeling_auto", "llmbackend.engine.model.module_runner")
"""By every section that runs an engine, so that a forked one need not wait for them."""


def main() -> None:
    given = _arguments()
    if given.download is not None:
        packages.download(given.download, ROOT)
        return
    start_s, failed = time.monotonic(), False
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llmbackend-gpu-") as scratch:
        _use_packages(given.packages, Path(scratch) / "packages", given.device)
        forks = not given.fresh_processes and _preloaded() and forks_work(given.device)
        memory = DeviceMemory(used_bytes)
        for part in given.part:
            lines, goes_on = _run_part(part, given, Path(scratch), start_s, forks, memory)
            failed |= any(line.get("failure") for line in lines)
            if not goes_on:
                break
            start_s = time.monotonic()
    sys.exit(failed)


def _run_part(
    part: int, given: argparse.Namespace, scratch: Path, start_s: float, forks: bool, memory: DeviceMemory
) -> tuple[list[dict[str, Any]], bool]:
    """Its lines, and whether later sections are worth their time: no gate failed."""
    results, on_gpu = Results(given.out.resolve(), part), given.device.startswith("cuda")
    results.lines_file.unlink(missing_ok=True)
    budget_s = given.budget_s or (parts.PART_LIMIT_S if on_gpu else parts.TRIAL_LIMIT_S)
    runner = Runner(given.device, scratch, results, start_s + budget_s, forks, memory)
    goes_on = True
    for planned in parts.sections(part, on_gpu):
        if not given.sections or planned.program in given.sections.split(","):
            failed = runner.run(planned)
            _write(runner, given.before)
            if failed and planned.is_gate:
                goes_on = False
                break
    print(report.page(results.lines()))
    return results.lines(), goes_on


def _write(runner: Runner, before: Path | None) -> None:
    lines = runner.results.lines()
    text = report.page(lines)
    if before is not None:
        text += "\n" + comparison(
            [one for file in sorted(before.glob("part*.jsonl")) for one in read_lines(file)], lines
        )
    runner.results.write_page(text)
    if runner.logs.exists():
        runner.results.pack(runner.logs)


def _use_packages(folder: Path | None, unpacked: Path, device: str) -> None:
    """For this process and all that it starts."""
    packages.describe_project(ROOT, unpacked)
    paths = [ROOT, unpacked]
    if folder is not None:
        packages.unpack(folder, unpacked)
        paths.append(folder.resolve())  # one that holds packages, not wheels
    sys.path[:0] = map(str, paths)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking torch for a GPU must not spoil it for forked processes
    if not device.startswith("cuda"):
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def _preloaded() -> bool:
    """Whether all could be imported; what is missing is told by the section that needs it."""
    try:
        for name in IMPORTED:
            import_module(name)
    except ImportError as error:
        print(f"not imported beforehand: {error}", flush=True)
        return False
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, nargs="+", choices=sorted(parts.PARTS), default=[1], help="one or more")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for lines, page and logs")
    parser.add_argument("--before", type=Path, help="folder with the results of an earlier run, to compare with")
    parser.add_argument("--packages", type=Path, help="folder that --download has filled")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="fill a folder for --packages, and end")
    parser.add_argument("--device", default="cuda", help="cpu: tiny shapes, for trying the benchmark itself")
    parser.add_argument("--sections", default="", help="only these, by the names of their programs")
    parser.add_argument("--budget-s", type=float, help="of a part's sections together; on a GPU 570")
    parser.add_argument("--fresh-processes", action="store_true", help="import everything anew for each section")
    return parser.parse_args()


if __name__ == "__main__":
    main()
