"""What holds for every test: nothing is left behind, hosts and engines kept their laws; and the hypothesis profiles.

Profiles (`--hypothesis-profile=NAME`): `suite`, the default, tries the same examples every time and shows the first
that fails as it is, so that a failure is known within the time that a test has; `nightly` tries four times as many, and
so does `shrink`, which makes what fails as short as it can; `search` tries 200 times as many in the stateful tests
(tests/helpers/machine_settings.py), new ones each time. The last two want `--timeout=0`.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from llmbackend.core.inference_server import InferenceServer
from llmbackend.engine.engine_core import EngineCore
from tests.helpers.leftovers import Conservation, Snapshot
from tests.helpers.tiers import is_nightly_file, nightly

_NIGHTLY = settings(derandomize=True, deadline=None, database=None, max_examples=100, report_multiple_bugs=False)
_PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("suite", _NIGHTLY, phases=_PHASES, max_examples=25)
settings.register_profile("nightly", _NIGHTLY, phases=_PHASES)
settings.register_profile("shrink", _NIGHTLY)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=5000, print_blob=True)
settings.load_profile("suite")

# Tiny products gain nothing from a second thread, whose waiting takes the core of another worker. Read by torch and by
# numpy's library when they are imported; how many threads an engine has is in its arguments.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels run in Triton's interpreter. Triton reads this when it is imported, which torch's compiler does on its own, so
# that the conftest beside the tests of kernels would come too late.
if not os.environ.get("LLMBACKEND_TEST_DEVICE"):  # tests/helpers/gpu/kernel_device.py
    os.environ["TRITON_INTERPRET"] = "1"


os.environ.setdefault("LLMBACKEND_GPUS", "")  # a test means the same on a machine with GPUs

# Each client that a test makes reads the certificates of authorities, which takes 20 ms for those of the system. Nobody
# outside this machine is asked; tests of TLS name an authority of their own.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

if "LLMBACKEND_WEIGHT_CACHE_DIR" not in os.environ:  # workers share that of the process that made them
    _weights = tempfile.TemporaryDirectory(prefix="llmbackend-weights-")
    atexit.register(_weights.cleanup)
    os.environ["LLMBACKEND_WEIGHT_CACHE_DIR"] = _weights.name
    os.environ["LLMBACKEND_WEIGHT_CACHE_SIZE"] = "2"

# A shell starts its background jobs with Ctrl+C ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

CONSERVATION = Conservation()
LONGEST = tuple(
    f"tests/{name}"
    for name in (
        "trials/test_quick_stall.py",
        "trials/chaos/test_quick_chaos.py",
        "conformance/",
        "test_unit_runs.py",
        "cluster/",
        "engine/test_llm_manager.py",
        "engine/test_remote_engines.py",
        "e2e/test_frontend_processes.py",
        "e2e/test_lifecycle_e2e.py",
        "remote/test_links.py",
        "embedding/",
        "engine/gpu/",
        "engine/test_determinism.py",
        "engine/test_native_attention.py",
        "engine/test_recurrent_models.py",
        "engine/test_latent_models.py",
        "properties/",
    )
)
SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that the mark expression leaves out as a whole are not even imported: their imports alone take seconds."""
    expression = config.option.markexpr
    if "not nightly" in expression and is_nightly_file(collection_path):
        return True
    if "not slow" in expression and collection_path.name.startswith("test_") and collection_path.is_file():
        return True if SLOW_FILE.search(collection_path.read_text()) else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Imports and parameters make millions of objects that stay: garbage is not looked for among them meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take or wait longest go first: no worker is left with one of them when the others are done."""
    for item in nightly(items):
        item.add_marker("nightly")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """What the imports have made lasts: no collection of garbage, of which tests ask for many, looks at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only reference counts free objects."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def conservation() -> Iterator[None]:
    """Fails a test that leaves something behind. The first fixture of a test to begin and the last one to end."""
    CONSERVATION.begin()
    yield
    if found := CONSERVATION.end():
        pytest.fail("left behind, or broken:\n" + "\n".join(found), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    before = Snapshot.take()
    result = yield
    CONSERVATION.fixture_is_up(fixturedef.argname, before)
    return result


def pytest_fixture_post_finalizer(fixturedef: Any) -> None:
    CONSERVATION.shared_hosts.discard(fixturedef.argname)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A CommandLine."""
    from tests.helpers.command_lines import CommandLine  # imports the server, which few tests need

    return CommandLine(monkeypatch, capsys)


@pytest.fixture(autouse=True, scope="session")
def self_checks() -> Iterator[None]:
    """Every host that is stopped and every engine core that is closed checks its own conservation, wherever it ran."""
    stop, close, make = InferenceServer.stop, EngineCore.close, EngineCore.__init__

    def checked_stop(server: InferenceServer, *args: Any, **options: Any) -> bool:
        done = stop(server, *args, **options)
        if done:
            CONSERVATION.breaches += [f"a stopped host: {breach}" for breach in server.check()]
        return done

    def checked_close(core: EngineCore) -> None:
        if sys.exc_info()[0] is None:  # else it is closed because a step was torn in the middle
            CONSERVATION.check_core(core)
        close(core)

    def noted_core(core: EngineCore, *args: Any) -> None:
        make(core, *args)
        if threading.current_thread() is threading.main_thread():
            CONSERVATION.cores.append(core)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InferenceServer, "stop", checked_stop)
        patch.setattr(EngineCore, "close", checked_close)
        patch.setattr(EngineCore, "__init__", noted_core)
        yield
