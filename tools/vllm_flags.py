"""`python -m tools.vllm_flags` writes the table of docs/command_line.md: the effect of each flag of `vllm serve`.

The texts are those of the flags' help and of the tables of flags without effect; the list of flags is vLLM's
(tests/cli/vllm_flags.txt). tests/cli/test_vllm_flags.py fails if the page differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.main import get_command

from llmbackend.adapter.foreign_engine_args import NO_EFFECT, ONLY_VALUE
from llmbackend.cli.flags.engine import GIVEN_ELSEWHERE, only_text
from llmbackend.cli.flags.inert import REASONS, REFUSED_SWITCHES, REFUSED_VALUES
from llmbackend.cli.serve import app

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ROOT / "tests" / "cli" / "vllm_flags.txt"
PAGE = ROOT / "docs" / "command_line.md"
BEGIN, END = "<!-- python -m tools.vllm_flags -->", "<!-- end -->"


def flags() -> list[str]:
    return [line.strip() for line in FLAGS.read_text().splitlines() if line.strip()]


def table() -> str:
    command: Any = get_command(app)
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    rows = [f"| `{flag}` | {described(flag, options.get(flag))} |" for flag in flags()]
    return "\n".join([BEGIN, "", "| flag of vLLM | here |", "|---|---|", *rows, "", END])


def described(flag: str, option: Any) -> str:
    """The flag's effect; "unknown" means that the command line lacks it."""
    name = flag.removeprefix("--").replace("-", "_")
    if name == "help":
        return "works"
    if name in REASONS:
        return f"no effect: {REASONS[name]}"
    if name in REFUSED_SWITCHES:
        return f"refused: {REFUSED_SWITCHES[name]}"
    if name in REFUSED_VALUES:
        values, reason = REFUSED_VALUES[name]
        return f"only {' or '.join(map(repr, values))}: {reason}" if any(values) else f"refused: {reason}"
    if name in NO_EFFECT and name not in GIVEN_ELSEWHERE:
        return f"no effect: {NO_EFFECT[name]}"
    if name in ONLY_VALUE and name not in GIVEN_ELSEWHERE:
        text = only_text(name).rstrip(".")
        return text[0].lower() + text[1:]
    if option is None:
        return "unknown"
    first = option.opts[0] if flag not in option.opts[:1] and not option.is_flag else ""
    also = f", the same as `{first}`" if first else ""
    return f"works{also}: {' '.join((option.help or '').split()).rstrip('.').replace('|', '/')}"


def page(text: str) -> str:
    """`text` with an up-to-date table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{table()}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
