"""The agents' tools, as far as the sessions need them: they really run commands and change files.

Used by replayed sessions. Independent of APIs. Invariant: a tool that cannot do what it was asked says so in its
result.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Workspace:
    folder: Path

    def run(self, command: str) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True, text=True, check=False)
        return f"Process exited with code {done.returncode}\nOutput:\n{done.stdout}{done.stderr}"

    def read(self, path: str) -> str:
        lines = Path(path).read_text().splitlines()
        return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1))

    def edit(self, path: str, old: str, new: str) -> str:
        text = Path(path).read_text()
        if text.count(old) != 1:
            return f"{old!r} is {text.count(old)} times in {path}, expected once"
        Path(path).write_text(text.replace(old, new))
        return f"The file {path} has been updated."

    def write(self, path: str, content: str) -> str:
        Path(path).write_text(content)
        return f"The file {path} has been written."

    def patch(self, text: str) -> str:
        """Files that are added, and one hunk for each file that is updated."""
        first, *lines, last = text.splitlines()
        if (first, last) != ("*** Begin Patch", "*** End Patch"):
            return f"no patch: {text!r}"
        told = []
        for part in "\n".join(lines).split("*** ")[1:]:
            head, *body = part.splitlines()
            kind, _, name = head.partition(": ")
            path = self.folder / name
            if kind == "Add File":
                path.write_text("".join(f"{line[1:]}\n" for line in body))
                told.append(f"A {name}")
            else:
                old = "".join(f"{line[1:]}\n" for line in body if line[0] in " -")
                new = "".join(f"{line[1:]}\n" for line in body if line[0] in " +")
                self.edit(str(path), old, new)
                told.append(f"M {name}")
        return "Success. Updated the following files:\n" + "\n".join(told)
