"""Settings of mkdocs in addition to tools/site/mkdocs.yml: pages that are not in docs/, and targets of links between
pages.

Part of `make docs`. Invariants: README.md is the first page; the reference has a page for each public module; a link to
a file that is not on the site is replaced by its text (`python -m tools.release.links` checks that the file exists).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
    "LICENSE": "licence.txt",
    "model_repository/demo/README.md": "demo_model.md",
    "model_repository_pipelines/README.md": "pipelines.md",
}
"""Of the checkout -> of the site. docs/NAME is NAME there."""
REFERENCE: Final = {
    "python": (
        "Python API",
        "What `from llmbackend import …` offers ([guide](../embedding.md)).",
        (
            *("embedding.engine.Engine", "embedding.server.Server", "embedding.sampling_params.SamplingParams"),
            *("embedding.generation.Generation", "embedding.generation.Completion", "embedding.generation.Usage"),
            *("embedding.generation.Logprob", "embedding.generation.Prompt", "core.errors.TritonError"),
            *("core.errors.ErrorCode", "demo.DEMO_MODEL", "demo.DEMO_REPOSITORY"),
        ),
    ),
    "backend_api": (
        "Backend API",
        "Everything that a backend may use of the host ([guide](../backend_authors.md)).",
        ("core.backend_api",),
    ),
    "repoagent_api": ("Repository agent API", "Everything that an agent may use of the host.", ("core.repoagent_api",)),
}
"""Page -> (title, text, what it describes, without `llmbackend.`)."""
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_SOURCE: Final = re.compile(r'((?:src|srcset|href)=")([^"]+)(")')
_CODE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for name, (title, text, objects) in REFERENCE.items():
        content = "\n\n".join([f"# {title}", text, *(f"::: llmbackend.{one}" for one in objects)])
        files.append(File.generated(config, f"reference/{name}.md", content=content + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return with_site_links(markdown, page.file.src_uri, files.src_uris)


def with_site_links(markdown: str, page: str, on_site: Iterable[str]) -> str:
    """page, on_site: paths of the site."""
    source = {there: here for here, there in PAGES.items()}.get(page, f"docs/{page}")
    known = set(on_site)

    def link(match: re.Match[str]) -> str:
        target = site_target(match[3], source, page, known)
        return f"{match[1]}[{match[2]}]({target})" if target else match[2]

    def attribute(match: re.Match[str]) -> str:
        return f"{match[1]}{site_target(match[2], source, page, known) or match[2]}{match[3]}"

    def outside_of_code(text: str) -> str:
        return _SOURCE.sub(attribute, _LINK.sub(link, text))

    pieces, end = [], 0
    for code in _CODE.finditer(markdown):
        pieces += [outside_of_code(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, outside_of_code(markdown[end:])])


def site_target(target: str, source: str, page: str, on_site: set[str]) -> str:
    """The link of a page of the site for that of its source; "" = it is not on the site."""
    name, hash_sign, anchor = target.partition("#")
    if not name or re.match(r"[a-z]+:", target) or page.startswith("reference/"):
        return target
    here = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    there = PAGES.get(here, here.removeprefix("docs/") if here.startswith("docs/") else "")
    if there not in on_site:
        return ""
    return posixpath.relpath(there, posixpath.dirname(page) or ".") + hash_sign + anchor
