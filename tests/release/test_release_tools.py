"""What the steps of `make release-check` find, and what their runner does with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tools.release import __main__ as runner
from tools.release import links, versions
from tools.release.dependencies import PACKAGE, closure, extras
from tools.release.licences import Rules, licence_of
from tools.release.sbom import without_others
from tools.release.steps import NOT_SHOWN, STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
RULES = Rules(
    frozenset({"MIT", "BSD-3-Clause", "Apache-2.0"}),
    frozenset({"LLVM-exception"}),
    {"bsd": "BSD-3-Clause"},
    {"odd": "MIT"},
)


def step(name: str, program: str) -> Step:
    return Step(name, f"{name} is shown", (sys.executable, "-c", program))


def test_all_steps_run_and_only_those_that_passed_are_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    steps = [
        step("good", "print(1)"),
        step("bad", "print('the reason'); raise SystemExit(2)"),
        step("absent", f"print('no builder'); raise SystemExit({NOT_SHOWN})"),
        step("last", ""),
    ]
    results = runner.Results(tmp_path / "results.json", "abc")
    assert runner.run_steps(steps, results, tmp_path / "logs") == 1
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if " s   " in line] == ["ok", "FAIL", "not", "ok"]
    assert "the reason" in printed and "no builder" in printed and "good is shown" in printed
    again = runner.Results(tmp_path / "results.json", "abc")
    assert list(again.passed) == ["good", "last"]
    assert runner.Results(tmp_path / "results.json", "another checkout").passed == {}
    assert runner.run_steps([steps[0], steps[2]], again, tmp_path / "logs") == 0
    assert "(before)" in capsys.readouterr().out


def test_the_checkout_is_known_by_its_files(tmp_path: Path) -> None:
    def digest() -> str:
        return runner.checkout_digest(tmp_path)

    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "a").write_text("1")
    before = digest()
    (tmp_path / "ignored").write_text("1")
    assert digest() == before
    (tmp_path / "a").write_text("2")
    assert digest() != before


def test_each_step_has_its_own_name() -> None:
    assert len({each.name for each in STEPS}) == len(STEPS)


@pytest.mark.parametrize(
    ("stated", "sections", "tags", "expected"),
    [
        ([("p", "1.2.3"), ("d", "1.2.3")], ["Unreleased", "1.2.3"], [], []),
        ([("p", "1.2.3")], ["1.2.3"], ["v1.2.3"], []),
        ([("p", "1.2.3"), ("SECURITY.md, …", "1.2")], ["1.2.3"], [], []),
        ([("p", "1.2.3"), ("SECURITY.md, …", "1.1")], ["1.2.3"], [], ["SECURITY.md, …: 1.1, expected 1.2.3"]),
        ([("p", "1.2.3"), ("d", "1.2.4")], ["1.2.3"], [], ["d: 1.2.4, expected 1.2.3"]),
        ([("p", "1.2.3")], ["Unreleased", "1.2.2"], [], ["newest release is 1.2.2, expected 1.2.3"]),
        ([("p", "1.2.3")], ["Unreleased", "1.2.3"], ["v1.2.3"], ["begins with 'Unreleased' at the tag"]),
        ([("p", "1.2.3")], ["1.2.3"], ["v1.3.0"], ["the tag v1.3.0, expected v1.2.3"]),
        ([("p", "1.2")], ["1.2"], [], ["1.2 is no version"]),
    ],
)
def test_versions_that_differ_are_found(
    stated: list[tuple[str, str]], sections: list[str], tags: list[str], expected: list[str]
) -> None:
    found = versions.faults(stated, sections, tags)
    assert len(found) == len(expected)
    assert all(text in fault for text, fault in zip(expected, found, strict=True))


def test_this_checkout_states_one_version() -> None:
    stated = [one for one in versions.stated_versions(ROOT) if not one[0].startswith("dist/")]
    assert {place for place, _ in stated} >= {"pyproject.toml", "llmbackend/__init__.py", "deploy/Containerfile"}
    assert versions.faults(stated, versions._SECTION.findall((ROOT / "CHANGELOG.md").read_text()), []) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c!\n## Twice\n## Twice\n```\n# no heading [x](nowhere)\n```\n`[x](nowhere)`\n")
    (tmp_path / "other.txt").touch()
    assert list(links.links(page.read_text())) == []
    assert links.anchors(page) == {"a-b-c", "twice", "twice-1"}
    text = '[a](page.md#twice-1) ![b](other.txt "title") [c `d`](#a-b-c) <img src="other.txt"> [e](https://a.b/c)'
    assert [links.fault(page, target, tmp_path) for target in links.links(text)] == [""] * 5
    assert links.fault(page, "gone.md", tmp_path) == "page.md: gone.md leads nowhere"
    assert links.fault(page, "../..", tmp_path) == "page.md: ../.. leads nowhere"
    assert links.fault(page, "#thrice", tmp_path) == "page.md: #thrice: the page has no heading '#thrice'"


def test_each_link_of_the_documentation_leads_somewhere(capsys: pytest.CaptureFixture[str]) -> None:
    status = links.main()
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("expression", "is_allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND BSD-3-Clause", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("GPL-3.0-only OR MIT AND GPL-2.0-only", False),
        ("(GPL-3.0-only OR MIT) AND BSD-3-Clause", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("Apache-2.0 WITH other-exception", False),
        ("", False),
        ("MIT MIT", False),
        ("(MIT", False),
        ("MIT AND", False),
    ],
)
def test_licences(expression: str, is_allowed: bool) -> None:
    assert RULES.allows(expression) is is_allowed


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT\nLicense: other", "MIT"),
        ("License: BSD", "BSD-3-Clause"),
        ("License: Own words", "Own words"),
        ("License: " + "A whole text. " * 9 + "\nClassifier: License :: OSI Approved :: BSD", "BSD-3-Clause"),
        ("Classifier: License :: OSI Approved :: BSD\nClassifier: License :: Odd", "BSD-3-Clause AND Odd"),
        ("Version: 1", ""),
    ],
)
def test_the_licence_of_a_package(tmp_path: Path, metadata: str, licence: str) -> None:
    (tmp_path / "METADATA").write_text(f"Name: a\n{metadata}\n")
    installed = PathDistribution(tmp_path)
    assert licence_of("a", installed, RULES) == licence
    assert licence_of("odd", installed, RULES) == "MIT"


def test_every_dependency_has_a_licence_that_we_may_pass_on() -> None:
    rules, packages = Rules.read(), closure()
    assert {"torch", "numpy", "ray", "nicegui", "openvino"} <= packages.keys() and PACKAGE not in packages
    assert "test" not in extras() and "pytest" not in packages
    assert [name for name, each in packages.items() if not rules.allows(licence_of(name, each, rules))] == []


def test_the_bill_has_what_is_installed_and_nothing_else() -> None:
    bom = {
        "metadata": {"component": {"bom-ref": "root"}},
        "components": [{"name": name, "bom-ref": name} for name in ("A_b", "c", "pytest")],
        "dependencies": [{"ref": "root", "dependsOn": ["A_b", "pytest"]}, {"ref": "A_b"}, {"ref": "pytest"}],
    }
    made = without_others(bom, ["a-b", "c"])
    assert [each["name"] for each in made["components"]] == ["A_b", "c"]
    assert made["dependencies"] == [{"ref": "root", "dependsOn": ["A_b"]}, {"ref": "A_b", "dependsOn": []}]
    with pytest.raises(KeyError):
        without_others(bom, ["missing"])
