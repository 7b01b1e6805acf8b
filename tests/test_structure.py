"""The structure of the package: no import cycles, packages within size limits, each module says what it is for."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tools.size_limits import ROOT, Size, excesses, folder_sizes, read_limits

MAX_FILE_LINES = 500


def test_modules_do_not_import_each_other_in_cycles() -> None:
    graph = grimp.build_graph("llmbackend", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_file_is_overlong() -> None:
    lines = {path: path.read_text().count("\n") for path in (ROOT / "llmbackend").rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_packages_are_within_their_size_limits() -> None:
    assert excesses(folder_sizes(ROOT / "llmbackend"), read_limits()) == []


def test_a_folder_over_its_limit_is_named(tmp_path: Path) -> None:
    (tmp_path / "core" / "models").mkdir(parents=True)
    (tmp_path / "core" / "a.py").write_text("x = 1\n" * 40)
    (tmp_path / "core" / "models" / "b.py").write_text("x = 1\n")
    sizes = folder_sizes(tmp_path)
    assert excesses(sizes, {"core": Size(2, 41)}) == []
    assert excesses(sizes, {"core": Size(1, 40)}) == ["core: files 2 > 1", "core: lines 41 > 40"]
    assert excesses(sizes, {})[0] == "core: files 2 > 0"


def test_each_module_says_what_it_is_for() -> None:
    modules = sorted((ROOT / "llmbackend").rglob("*.py"))
    assert [path for path in modules if not ast.get_docstring(ast.parse(path.read_text()))] == []
