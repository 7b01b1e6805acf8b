"""For each session: its task, the model's output, and the expected state of the disk afterwards.

Used by tests of real agents and of replayed sessions. Independent of servers. Invariant: a session succeeds only if
each tool's result reached the model and the effect of each call reached the disk.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .scripts import CallFormat, Turn

TASK = "Fix the spelling in greet.py and run it."
SYSTEM = "You change files.\n" * 200
_NOTES = 'notes with "quotes", \\backslashes\\ and ümlauts'
_BEFORE = 'import sys\n\n\ndef greet(name: str) -> None:\n    print("helo,", name, end="!\\n")\n\n\ngreet("wörld")\n'
_PATCH = (
    "*** Begin Patch\n"
    "*** Update File: greet.py\n"
    "@@\n"
    ' def greet(name: str) -> None:\n-    print("helo,", name, end="!\\n")\n+    print("hello,", name, end="!\\n")\n'
    "*** Add File: NOTES.md\n"
    f"+{_NOTES}\n"
    "*** End Patch\n"
)
LAST_WORDS = 'greet.py now prints hello, and NOTES.md says what it means: 1 < 2 & "so on" — ünïcödé.'


def prepare(folder: Path) -> Path:
    folder.mkdir()
    (folder / "greet.py").write_text(_BEFORE)
    (folder / "README").write_text("A greeting.\n")
    return folder


def check(folder: Path) -> None:
    assert (folder / "greet.py").read_text() == _BEFORE.replace("helo", "hello")
    assert (folder / "NOTES.md").read_text() == f"{_NOTES}\n"
    assert (folder / "out.txt").read_text() == "hello, wörld!\n"


def codex_turns(form: CallFormat) -> list[Turn]:
    """Two commands side by side, a patch by the custom tool, a command, words."""
    look = form.call("exec_command", {"cmd": "cat greet.py"}) + form.call("exec_command", {"cmd": "cat README"})
    run = form.call("exec_command", {"cmd": "python3 greet.py > out.txt && cat out.txt"})
    return [
        Turn(0, TASK, f"<think>I have to see both files.</think>Reading two files.{look}"),
        Turn(2, "A greeting.", f'<think>"helo" is wrong.</think>{form.call("apply_patch", {"input": _PATCH})}'),
        Turn(3, "A NOTES.md", f"Running it.{run}"),
        Turn(4, "hello, wörld!", f"<think>It works.</think>{LAST_WORDS}"),
    ]


def codex_programs(form: CallFormat) -> list[Turn]:
    """The same for models that Codex lets write programs: its one tool is `exec` of the namespace `functions`."""

    def program(code: str) -> str:
        return form.call("functions__exec", {"input": code})

    look = (
        '// @exec: {"yield_time_ms": 20000}\n'
        "const show = (name) => tools.exec_command({cmd: `cat ${name}`});\n"
        'const seen = await Promise.all(["greet.py", "README"].map(show));\n'
        "for (const one of seen) text(one);\n"
    )
    patch = f"text(await tools.apply_patch({json.dumps(_PATCH)}));"
    run = 'text(await tools.exec_command({cmd: "python3 greet.py > out.txt && cat out.txt"}));'
    return [
        Turn(0, TASK, f"<think>I have to see both files.</think>Reading two files.{program(look)}"),
        Turn(1, "A greeting.", f'<think>"helo" is wrong.</think>{program(patch)}'),
        Turn(2, "", f"Running it.{program(run)}"),
        Turn(3, "hello, wörld!", f"<think>It works.</think>{LAST_WORDS}"),
    ]


def claude_turns(form: CallFormat, folder: Path) -> list[Turn]:
    """Two files read side by side, an edit, a new file, a command, words."""
    script, notes = str(folder / "greet.py"), str(folder / "NOTES.md")
    read = form.call("Read", {"file_path": script}) + form.call("Read", {"file_path": str(folder / "README")})
    edit = form.call("Edit", {"file_path": script, "old_string": '"helo,"', "new_string": '"hello,"'})
    write = form.call("Write", {"file_path": notes, "content": f"{_NOTES}\n"})
    run = form.call("Bash", {"command": "python3 greet.py > out.txt && cat out.txt", "description": "Run it"})
    return [
        Turn(0, TASK, f"<think>I have to see both files.</think>Reading two files.{read}"),
        Turn(2, "A greeting.", f'<think>"helo" is wrong.</think>{edit}'),
        Turn(3, "greet.py", write),
        Turn(4, "NOTES.md", f"Running it.{run}"),
        Turn(5, "hello, wörld!", f"<think>It works.</think>{LAST_WORDS}"),
    ]


def claude_helpers(form: CallFormat, folder: Path) -> list[Turn]:
    """Two helpers side by side, each with a conversation of its own that reads a file; then the words of both."""

    def helper(name: str) -> str:
        prompt = f"Say what is in {folder / name}."
        asked = {"description": f"Read {name}", "prompt": prompt, "subagent_type": "general-purpose"}
        return form.call("Agent", asked | {"run_in_background": False})

    def reads(name: str, found: str, says: str) -> list[Turn]:
        read = form.call("Read", {"file_path": str(folder / name)})
        return [Turn(0, f"Say what is in {folder / name}.", read), Turn(1, found, f"<think>I see.</think>{says}")]

    return [
        *reads("greet.py", "helo,", "It says helo."),
        *reads("README", "A greeting.", "A greeting is meant."),
        Turn(0, TASK, f"<think>Others can look.</think>{helper('greet.py')}{helper('README')}"),
        Turn(2, "A greeting is meant.", LAST_WORDS),
    ]


def deaths(turns: Sequence[Turn]) -> list[int]:
    """After how many tokens of the session its engine dies: in the first half of it, so that each death comes before
    the end. The scripted model makes one token of each byte and one of each end."""
    tokens = sum(len(turn.says.encode()) + 1 for turn in turns)
    return [share * tokens // 6 for share in (1, 2, 3)]
