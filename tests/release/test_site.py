"""The pages of the site: links lead to where their targets are there, docstrings of columns become lists."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from tools.site.columns import with_lists
from tools.site.hooks import PAGES, REFERENCE, with_site_links

ROOT = Path(__file__).resolve().parents[2]
ON_SITE = ["index.md", "changelog.md", "engine.md", "reference/python.md", "images/a.png", "demo_model.md"]


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("engine.md", "[a](engine.md#x)", "[a](engine.md#x)"),
        ("engine.md", "[a](#x) [b](https://a.b/c.md)", "[a](#x) [b](https://a.b/c.md)"),
        ("engine.md", "[a](../README.md) ![i](images/a.png)", "[a](index.md) ![i](images/a.png)"),
        ("engine.md", "[`a`](../tests/test_a.py)", "`a`"),
        ("index.md", "[a](docs/engine.md) [b](model_repository/demo/README.md)", "[a](engine.md) [b](demo_model.md)"),
        ("index.md", '<img src="docs/images/a.png">', '<img src="images/a.png">'),
        (
            "index.md",
            "```\n[a](docs/engine.md)\n```\n[a](docs/engine.md)",
            "```\n[a](docs/engine.md)\n```\n[a](engine.md)",
        ),
        ("demo_model.md", "[a](../../CHANGELOG.md)", "[a](changelog.md)"),
        ("reference/python.md", "[a](../engine.md)", "[a](../engine.md)"),
    ],
)
def test_links_of_the_site(page: str, text: str, expected: str) -> None:
    assert with_site_links(text, page, ON_SITE) == expected


def test_columns_become_lists() -> None:
    text = "What it does.\n\na, b  of the model;\n      None = none\nc     False\nThe end: it raises.\none: thing"
    lists = (
        "What it does.\n\n- `a, b`: of the model;\n  None = none\n- `c`: False\n\nThe end: it raises.\n\n- `one`: thing"
    )
    assert with_lists(text) == lists
    assert with_lists("Just text.\n    code  here") == "Just text.\n    code  here"


def test_what_the_site_shows_exists() -> None:
    assert [page for page in PAGES if not (ROOT / page).exists()] == []
    for _, _, objects in REFERENCE.values():
        for path in objects:
            module, _, name = f"llmbackend.{path}".rpartition(".")
            assert name in vars(import_module(module)) or import_module(f"llmbackend.{path}"), path


def test_the_reference_has_the_whole_public_api() -> None:
    stub = ast.parse((ROOT / "llmbackend" / "__init__.pyi").read_text())
    offered = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert offered <= {path.rpartition(".")[2] for path in REFERENCE["python"][2]}
    policy = (ROOT / "docs" / "stability.md").read_text()
    assert [name for name in offered if f"`{name}`" not in policy] == []
