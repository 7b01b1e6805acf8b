"""Replays transcripts in the order in which they were recorded, against servers set up as the recordings' were.

For: the command line and the tests. Does not know: what a right answer is. Invariant: transcripts of a group share
one server in recorded order, since they depend on what came before (a failed load makes the server unready from then
on, counters add up).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .by_design import Rule, read_rules
from .compare import TranscriptOutcome, compare
from .server import NVIDIAS_BACKENDS, RECORDED_PORTS, Server, make_work_folder
from .transcript import Command, Transcript, read_transcript

HERE = Path(__file__).resolve().parent.parent
GOLDEN = HERE / "golden"
RULES = HERE / "by_design.toml"
COMMAND_TIMEOUT_S = 60.0
MAX_SLEEP_S = 0.6
"""The recordings waited seconds for a slower server; nothing that is compared takes this long here."""
EVENT_LOG_QUIET_S = 0.5
_LEAVE_AT_ONCE = "\nimport os, sys; sys.stdout.flush(); os._exit(0)\n"
"""A client that a script left open is closed as the interpreter goes down, and now and then waits there for ever."""
_SLEEP = re.compile(r"\bsleep ([\d.]+)")


@dataclass(frozen=True)
class Group:
    """One server's life: its arguments ($WORK is filled in), and what was recorded on it, in order."""

    log_name: str
    arguments: tuple[str, ...]
    numbers: tuple[str, ...]


def _explicit(repositories: Iterable[str], models: Iterable[str]) -> tuple[str, ...]:
    repository_flags = [flag for name in repositories for flag in ("--model-repository", f"$WORK/{name}")]
    model_flags = [flag for name in models for flag in ("--load-model", name)]
    return (*repository_flags, "--model-control-mode", "explicit", *model_flags)


_TRACING = (
    *("--trace-config", "triton,file=$WORK/trace.json", "--trace-config", "rate=1"),
    *("--trace-config", "level=TIMESTAMPS"),
)
GROUPS = (
    Group(
        "a",
        (
            *_explicit(["repo"], ["identity", "multi", "llm", "textid", "cached"]),
            *("--cache-config", "local,size=1048576"),
        ),
        (
            *("01", "02", "03", "04", "05", "06", "07", "08", "11", "12", "13"),
            *("20", "21", "22", "23", "24", "30", "31", "32", "33", "34", "40", "41", "42", "43", "44", "09", "10"),
        ),
    ),
    Group(
        "e1",
        _explicit(["repo_extra", "repo"], ["auto", "noconf", "vers", "asyncm", "custom", "llm", "viabackend"]),
        ("57", "61"),
    ),
    Group("e2", _explicit(["repo_extra"], ["crash"]), ("62",)),
    Group("c2", _explicit(["repo"], ["llm", "identity"]), ("51",)),
    Group(
        "e2",
        (
            *_explicit(["repo_extra", "repo"], ["llm", "multi"]),
            *_TRACING,
            *("--http-header-forward-pattern", "(X-.*|traceparent)", "--grpc-header-forward-pattern", "(x-.*)"),
            *("--http-restricted-api", "model-repository:admin-key=sesame"),
        ),
        ("60",),
    ),
    Group("d1", ("--model-repository", "$WORK/repo_none"), ("55",)),
    Group(
        "d2",
        ("--model-repository", "$WORK/repo_none", "--model-control-mode=poll", "--repository-poll-secs=0.2"),
        ("56",),
    ),
)
_EMPTY_EVENT_LOG_BEFORE = frozenset({"24", "34"})
_UNRECORDED_BEFORE = {
    "42": "curl -s -X POST 127.0.0.1:18000/v2/repository/models/seq/load",
    "43": "curl -s -X POST 127.0.0.1:18000/v2/repository/models/ens/load",
}
"""What the recording did between its transcripts without showing it."""
_MAX_SLEEP_S = {"42": 2.5, "56": 4.0 if NVIDIAS_BACKENDS else 2.0}
"""Where a wait is what is compared: a sequence of 42 is idle after two seconds, 56 waits for polls and loads."""
_OWN_PYTHON_BACKEND = frozenset({"memory-usage", "no-bytecode", "response-parameters", "stub-restart", "unload-time"})
"""Rules that NVIDIA's python backend does not need: with it the answers are the recorded ones."""


@dataclass(frozen=True)
class Unrecorded:
    """What was done before a recorded command and is not in the transcript: requests to a server of its own, which has
    ended when the command runs."""

    group: Group
    commands: tuple[str, ...]


_ANOTHER_SERVER_BEFORE = {
    ("60", "cat $WORK/trace.json"): Unrecorded(
        Group("e3", (*_explicit(["repo"], ["llm", "identity"]), *_TRACING), ()),
        (
            "curl -s -X POST 127.0.0.1:18000/v2/models/identity/infer -d "
            """'{"id":"t1","inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'""",
            """curl -s -X POST 127.0.0.1:18000/v2/models/llm/generate_stream -d '{"text_input":"n=2"}'""",
        ),
    )
}


@dataclass(frozen=True)
class Report:
    transcripts: tuple[TranscriptOutcome, ...]
    stale_rules: tuple[Rule, ...]


def replay_all(only: Sequence[str] = ()) -> Report:
    """Replays every group, or the transcripts whose numbers are in `only` behind those that came before them in their
    recordings, on which their answers depend."""
    rules = [rule for rule in read_rules(RULES) if not (NVIDIAS_BACKENDS and rule.name in _OWN_PYTHON_BACKEND)]
    transcripts = {path.name[:2]: read_transcript(path) for path in sorted(GOLDEN.glob("*.txt"))}

    def replay(group: Group) -> list[TranscriptOutcome]:
        wanted = [index for index, number in enumerate(group.numbers) if not only or number in only]
        if not wanted:
            return []
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            make_work_folder(Path(folder), HERE / "models")
            replayed = [transcripts[number] for number in group.numbers[: wanted[-1] + 1]]
            done = _replay_group(group, replayed, Path(folder), rules)
            return [done[index] for index in wanted]

    with ThreadPoolExecutor(3) as pool:  # their commands wait more than they compute
        outcomes = [outcome for done in pool.map(replay, GROUPS) for outcome in done]
    used = {rule for outcome in outcomes for command in outcome.commands for rule in command.rules}
    return Report(tuple(outcomes), tuple(rule for rule in rules if rule not in used))


def _replay_group(
    group: Group, transcripts: Sequence[Transcript], work: Path, rules: Sequence[Rule]
) -> list[TranscriptOutcome]:
    with _started(group, work) as server:
        replay = Replay(server)
        return [_replay_transcript(replay, transcript, rules) for transcript in transcripts]


def _replay_transcript(replay: Replay, transcript: Transcript, rules: Sequence[Rule]) -> TranscriptOutcome:
    if transcript.number in _EMPTY_EVENT_LOG_BEFORE:
        _empty_when_quiet(replay.server.event_log)
    if transcript.number in _UNRECORDED_BEFORE:
        replay.answer(Command(_UNRECORDED_BEFORE[transcript.number], "", 0))
    longest_sleep_s = _MAX_SLEEP_S.get(transcript.number, MAX_SLEEP_S)
    outcomes = []
    for command in transcript.commands:
        unrecorded = _ANOTHER_SERVER_BEFORE.get((transcript.number, command.text))
        if unrecorded is not None:
            _run_unrecorded(unrecorded, replay.server.work)
        outcomes.append(compare(transcript.number, command, replay.answer(command, longest_sleep_s), rules))
    return TranscriptOutcome(transcript.name, tuple(outcomes))


def _empty_when_quiet(event_log: Path) -> None:
    """The recorded model writes its last line of a request after the final response: waits for those still to come."""
    size = -1
    while event_log.stat().st_size != size:
        size = event_log.stat().st_size
        time.sleep(EVENT_LOG_QUIET_S)
    os.truncate(event_log, 0)


def _run_unrecorded(unrecorded: Unrecorded, work: Path) -> None:
    with _started(unrecorded.group, work) as server:
        replay = Replay(server)
        for text in unrecorded.commands:
            replay.answer(Command(text, "", 0))


def _started(group: Group, work: Path) -> Server:
    return Server(work, group.log_name, [argument.replace("$WORK", str(work)) for argument in group.arguments])


class Replay:
    """Runs recorded commands against one server, with its ports and folder in place of the recorded ones."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._modules = server.work / "gold"
        self._modules.mkdir(exist_ok=True)
        (self._modules / "g.py").write_text(self._rewrite((GOLDEN / "g.py").read_text()))

    def answer(self, command: Command, longest_sleep_s: float = MAX_SLEEP_S) -> str:
        """What the command prints, in the layout of the recording."""
        if command.script is not None:
            output, _ = self._run([sys.executable, "-c", self._rewrite(command.script) + _LEAVE_AT_ONCE])
            return self._unrewrite(output) + "\n"
        shell = _SLEEP.sub(lambda match: f"sleep {min(float(match.group(1)), longest_sleep_s)}", command.text)
        output, code = self._run(["bash", "-c", self._rewrite(shell)])
        status = f"[exit {code}]\n" if code > 0 else ""  # the recording does not tell that a command was killed
        return self._unrewrite(output.replace("\r", "")) + "\n" + status + "\n"

    def _run(self, arguments: list[str]) -> tuple[str, int]:
        """A command that does not end is killed with all that it started; its exit code is then negative."""
        process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.server.work,
            env=dict(os.environ, PYTHONPATH=str(self._modules)),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return output.decode(errors="replace"), process.returncode

    def _rewrite(self, text: str) -> str:
        for protocol, recorded in RECORDED_PORTS.items():
            text = re.sub(rf"\b{recorded}\b", str(getattr(self.server.ports, protocol)), text)
        return text.replace("$WORK", str(self.server.work))

    def _unrewrite(self, text: str) -> str:
        return text.replace(str(self.server.work), "$WORK")
