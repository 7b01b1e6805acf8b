"""`python -m tools.release.links`: checks that each link in a page leads to a file of the checkout, and to a heading in
it.

Part of `make release-check` and of a test. Addresses of other servers are not checked, only listed by `--external`.
Anchors are GitHub's: lower case, without punctuation, spaces as hyphens.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/*.md", "model_repository*/**/*.md")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)[^)]*\)|(?:src|href|srcset)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_ID = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def links(text: str) -> Iterator[str]:
    """Targets, outside of code."""
    for match in _LINK.finditer(_CODE.sub("", _FENCE.sub("", text))):
        yield match[1] or match[2]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of the headings of a page, and of its HTML."""
    text = _FENCE.sub("", page.read_text())
    counts: Counter[str] = Counter()
    found = set(_ID.findall(text))
    for heading in _HEADING.findall(text):
        anchor = slug(heading)
        found.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return frozenset(found)


def slug(heading: str) -> str:
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def fault(page: Path, target: str, root: Path) -> str:
    """What is wrong with a link of a page; "" = nothing."""
    if re.match(r"[a-z]+:", target):
        return ""
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.is_relative_to(root.resolve()) or not path.exists():
        return f"{page.relative_to(root)}: {target} leads nowhere"
    if anchor and path.suffix == ".md" and anchor not in anchors(path):
        return f"{page.relative_to(root)}: {target}: {name or 'the page'} has no heading '#{anchor}'"
    return ""


def main() -> int:
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    found = [(page, target) for page in pages for target in links(page.read_text())]
    faults = [text for page, target in found if (text := fault(page, target, ROOT))]
    external = sorted({target for _, target in found if re.match(r"https?:", target)})
    print(*(external if "--external" in sys.argv else ()), *faults, sep="\n")
    print(f"{len(pages)} pages, {len(found)} links, {len(external)} addresses elsewhere (not opened)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
