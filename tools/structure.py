"""The structure of the package: its modules, what each is for, and which import which.

For: the list of modules in docs/architecture.md (`python -m tools.structure --write`) and tests/test_structure.py. Does
not know: what modules do; it reads source files and imports none. Imports for type checkers count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llmbackend"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: begin -->\n", "<!-- modules: end -->\n"


@dataclass(frozen=True)
class Module:
    name: str  # dotted
    path: Path
    is_package: bool
    num_lines: int
    head: str  # the first paragraph of its docstring, on one line; "" without one
    imports: frozenset[str]  # modules of the package

    @property
    def is_empty(self) -> bool:
        """A package's __init__.py that says what the folder is for, at most."""
        return self.is_package and not self.imports


def read_modules() -> dict[str, Module]:
    files = {_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    return {name: _read(name, path, files) for name, path in files.items()}


def import_circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Sets of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in modules[name].imports:
            if other not in index:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == index[name]:
            start = stack.index(name)
            circle, stack[start:] = stack[start:], []
            if len(circle) > 1:
                circles.append(sorted(circle))

    for name in modules:
        if name not in index:
            visit(name)
    return circles


def page(modules: Mapping[str, Module]) -> str:
    """docs/architecture.md with its list of modules as the source has it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "".join(_lines(modules)) + END + after


def _lines(modules: Mapping[str, Module]) -> Iterator[str]:
    folders: dict[str, list[Module]] = {}
    for module in modules.values():
        folder = module.path.parent.relative_to(ROOT).as_posix()
        folders.setdefault(folder, [])
        if not module.is_package:
            folders[folder].append(module)
    for folder, content in folders.items():
        if content and folder != PACKAGE:
            head = modules[folder.replace("/", ".")].head
            yield f"\n**`{folder}/`**{f': {head}' if head else ''}\n\n"
            yield from (f"- `{module.path.name}`: {module.head}\n" for module in content)


def _read(name: str, path: Path, files: Mapping[str, Path]) -> Module:
    source = path.read_text()
    tree = ast.parse(source)
    is_package = path.name == "__init__.py"
    package = name if is_package else name.rpartition(".")[0]
    head = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
    imports = frozenset(found for node in ast.walk(tree) for found in _imported(node, package, files)) - {name}
    return Module(name, path, is_package, source.count("\n"), head, imports)


def _imported(node: ast.AST, package: str, files: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in files)
    elif isinstance(node, ast.ImportFrom):
        base = package.rsplit(".", node.level - 1)[0] if node.level else ""
        source = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            if submodule in files:
                yield submodule
            elif source in files:
                yield source


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> None:
    modules = read_modules()
    if "--write" in sys.argv:
        PAGE.write_text(page(modules))
    importers = [sum(one.name in other.imports for other in modules.values()) for one in modules.values()]
    content = [one for one in modules.values() if not one.is_empty]
    print(f"{len(modules)} files, {sum(one.num_lines for one in content)} lines")
    print(f"{importers.count(1)} modules with one importer, {len(import_circles(modules))} import circles")
    largest = max(content, key=lambda one: one.num_lines)
    print(f"largest: {largest.name}, {largest.num_lines} lines")


if __name__ == "__main__":
    main()
