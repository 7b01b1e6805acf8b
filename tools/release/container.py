"""`python -m tools.release.container`: builds deploy/Containerfile and asks the demo model in the image a question.

Part of `make release-check`. Uses the first builder that works: podman, docker, or buildah. PYTHON_IMAGE, TORCH_INDEX:
build arguments; RELEASE_BUILD_ARGS: additional arguments for the builder. If the base image cannot be pulled, a Debian
folder with the same Python replaces it (tools/release/debian_root.py). buildah runs commands in a chroot. Exits with
NOT_SHOWN if nothing can build.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tools.release.debian_root import ROOT, make_root, why_impossible
from tools.release.steps import NOT_SHOWN

TAG: Final = "localhost/llmbackend:release-check"
_BASE: Final = "localhost/python-of-debian:bookworm"
_SUITE: Final = "bookworm"
"""Has the Python of the Containerfile's own base image."""
_READY_S: Final = 120.0
_URL: Final = "http://127.0.0.1:18080"


def builder() -> str:
    """ "" = none works."""
    for name in ("podman", "docker", "buildah"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return ""


def build(name: str, base: str) -> bool:
    """base: "" = that of the Containerfile."""
    given = {"PYTHON_IMAGE": base, "TORCH_INDEX": os.environ.get("TORCH_INDEX", "")}
    arguments = [f"--build-arg={key}={value}" for key, value in given.items() if value]
    how = ["--isolation=chroot", "--network=host"] if name == "buildah" else []
    how += shlex.split(os.environ.get("RELEASE_BUILD_ARGS", ""))
    command = [name, "build", *how, *arguments, "--file=deploy/Containerfile", f"--tag={TAG}", "."]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def base_of_debian(name: str) -> str:
    """An image that is a Debian folder."""
    root = make_root(_SUITE)
    made = subprocess.run([name, "from", "scratch"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([name, "add", "--quiet", made, str(root), "/"], check=True)
    subprocess.run([name, "commit", "--quiet", "--rm", made, _BASE], check=True)
    return _BASE


@contextmanager
def running(name: str) -> Iterator[subprocess.Popen[bytes]]:
    """The image's own command, on a port of loopback, with a root that is read only where the builder can do that."""
    arguments = ["--demo", "--http-address", "127.0.0.1", "--http-port", "18080", "--grpc-address", "127.0.0.1"]
    arguments += ["--grpc-port", "18081", "--metrics-port", "18082"]
    if name == "buildah":
        made = subprocess.run([name, "from", TAG], capture_output=True, text=True, check=True).stdout.strip()
        command = [name, "run", "--isolation=chroot", "--network=host", made, "--", "llmbackend", "serve", *arguments]
        end = [name, "rm", made]
    else:
        made = "llmbackend-release-check"
        command = [
            name,
            "run",
            "--rm",
            "--read-only",
            "--tmpfs=/tmp",
            "--network=host",
            f"--name={made}",
            TAG,
            *arguments,
        ]
        end = [name, "rm", "--force", made]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        subprocess.run(end, capture_output=True, check=False)


def answers(process: subprocess.Popen[bytes]) -> bool:
    """Whether the server becomes ready and its model says something."""
    if not _eventually(lambda: process.poll() is not None or _is_ready()) or process.poll() is not None:
        return False
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}]}
    request = urllib.request.Request(
        f"{_URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    print(f"the image answers: {text}")
    return bool(text)


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{_URL}/v2/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _eventually(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + _READY_S
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.2)
    return False


def main() -> int:
    name = builder()
    if not name:
        print("no image was built: none of podman, docker and buildah works here (deploy/Containerfile was only read)")
        return NOT_SHOWN
    base = os.environ.get("PYTHON_IMAGE", "")
    if not build(name, base):
        if base or name != "buildah" or (reason := why_impossible()):
            print(f"the image was not built with {name}{'' if base else f', and no Debian takes its base: {reason}'}")
            return 1
        if not build(name, base_of_debian(name)):
            return 1
    with running(name) as process:
        is_answered = answers(process)
    print(f"built and asked with {name}" if is_answered else "FAIL the image does not answer")
    return 0 if is_answered else 1


if __name__ == "__main__":
    sys.exit(main())
