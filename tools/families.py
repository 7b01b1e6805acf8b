"""`python -m tools.families`: the tables of docs/models.md: how the engine runs each family.

    python -m tools.families            rewrites the page, after a change of tests/helpers/families.py
    python -m tools.families --all      first tests every causal language model of transformers (10 minutes)
    python -m tools.families qwen3 glm  first tests these

tests/engine/test_families.py fails if the page differs from what this writes.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
import transformers

from llmbackend.gguf import families as gguf_families
from tests.helpers.families import ALL, RESULTS_FILE, Result, family_of, results, tried

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "models.md"
_BEGIN, _END = "<!-- python -m tools.families -->", "<!-- end -->"
_MOST_TEXT: Final = 200
_MOST_S: Final = 120.0
"""Per family; a hanging load is a result too."""


def page() -> str:
    """The page with up-to-date tables."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return before + "\n".join((_BEGIN, "", *_tables(results()), "", _END)) + rest.partition(_END)[2]


def _tables(found: Mapping[str, Result]) -> Iterator[str]:
    yield f"{len(found)} model types of transformers {transformers.__version__}:"
    yield ""
    yield from _served(found)
    yield ""
    yield "Refused, with the server's reason:"
    yield ""
    yield from _by_reason(found, "refused")
    yield ""
    yield "Not tested, because transformers cannot build a model from a small config:"
    yield ""
    yield from _by_reason(found, "not built")


def _served(found: Mapping[str, Result]) -> Iterator[str]:
    of_llama = {"mistral", "mixtral"}
    gguf = of_llama | {family.model_type for family in gguf_families.FAMILIES.values()}
    yield "| family | models | runs as | why as modules | GGUF |"
    yield "|---|---|---|---|---|"
    for how, text in (("native", "native program"), ("modules", "modules")):
        for name in sorted(name for name, result in found.items() if result.how == how):
            family = family_of(name)
            why = family.note or found[name].why
            yield f"| `{name}` | {family.models} | {text} | {why} | {'yes' if name in gguf else ''} |"


def _by_reason(found: Mapping[str, Result], how: str) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, result in sorted(found.items()):
        if result.how == how:
            names.setdefault(_reason(result.why), []).append(f"`{name}`")
    yield "| why | families |"
    yield "|---|---|"
    for why, each in sorted(names.items(), key=lambda item: -len(item[1])):
        yield f"| {why} | {', '.join(each)} |"


def _reason(text: str) -> str:
    """One line, without the architecture's name."""
    line = " ".join(text.rpartition("is not supported: ")[2].split()).replace("|", "/")
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]} …"


def try_families(names: Sequence[str]) -> None:
    """Saves results after each family, so an interrupted run loses nothing. Exits with an error if one is wrong."""
    torch.set_num_threads(1)
    wrong = []
    for name in names:
        result = _in_a_process(name)
        print(name, *result, flush=True)
        if result.how in ("native", "modules", "refused", "not built"):
            kept = {**results(), name: result}
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in ALL if key in kept)
            RESULTS_FILE.write_text(f"{{\n{lines}\n}}\n")
        else:
            wrong.append(name)
    if wrong:
        sys.exit(f"tokens differ from those of transformers, or neither served nor refused: {', '.join(wrong)}")


def _in_a_process(name: str) -> Result:
    """In its own process, so a crash or hang affects no other family."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_try, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        return Result(*ours.recv()) if ours.poll(_MOST_S) else Result("hangs")
    except EOFError:
        return Result("dies")
    finally:
        process.kill()
        process.join()


def _try(name: str, answer: Connection) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = tried(family_of(name), Path(folder))
    except Exception as error:
        result = Result("is wrong", f"{type(error).__name__}: {error}")
    answer.send(result)  # after the folder is removed: the parent then kills this process


if __name__ == "__main__":
    try_families(ALL if sys.argv[1:] == ["--all"] else sys.argv[1:])
    PAGE.write_text(page())
