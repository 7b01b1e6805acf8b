"""Repository agents: their life cycle, and the bundled checksum agent."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_backends import VERSIONED_BACKEND, answer, states, write_version
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, Repository, send, serving, version_of
from tests.helpers.waiting import eventually

# Notes what it is told; the parameter `fail` names what raises.
AGENT = """
from tests.helpers.core_host import STAGE
from llmbackend.core.repoagent_api import Action, invalid_argument

def note(agent, model, event):
    STAGE.note(agent.name + " " + event)
    if model is not None and model.parameters.get("fail") == event:
        raise invalid_argument("the agent does not want to")

def TRITONREPOAGENT_Initialize(agent): note(agent, None, "Initialize")
def TRITONREPOAGENT_Finalize(agent): note(agent, None, "Finalize")
def TRITONREPOAGENT_ModelInitialize(agent, model): note(agent, model, "ModelInitialize")
def TRITONREPOAGENT_ModelFinalize(agent, model): note(agent, model, "ModelFinalize")
def TRITONREPOAGENT_ModelAction(agent, model, action): note(agent, model, action.name)
"""

# Brings the model's files from elsewhere.
FETCHER = """
import shutil
from tests.helpers.core_host import STAGE
from llmbackend.core.repoagent_api import Action

def TRITONREPOAGENT_ModelAction(agent, model, action):
    if action is Action.LOAD:
        place = model.acquire_location()
        assert place == model.acquire_location() and not list(place.iterdir())
        shutil.copytree(model.parameters["from"], place, dirs_exist_ok=True)
        model.update_location(place)
        STAGE.kept.append(place)
"""


class Agents:
    """Agent modules in a --repoagent-directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, source: str = AGENT, file: str = "") -> None:
        path = self.root / name / (file or f"tritonrepoagent_{name}.py")
        path.parent.mkdir(parents=True)
        path.write_text(source)


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    return Agents(tmp_path / "agents")


@pytest.fixture
def versioned(repository: Repository) -> Repository:
    repository.backend("v", VERSIONED_BACKEND)
    return repository


def wants(*agents: str, **parameters: str) -> str:
    """The configuration of a model that names these agents, all with the same parameters."""
    given = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return "model_repository_agents { " + "".join(f'agents {{ name: "{name}" {given} }} ' for name in agents) + "}"


def serve(repository: Repository, agents: Agents, *models: str, **options: Any) -> Any:
    return serving(repository, *models, repoagent_directory=agents.root, **options)


def refusal(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> str:
    """Why the model could not be polled, from the log; the client only hears that."""
    with pytest.raises(TritonError) as caught:
        server.load_model("m")
    assert caught.value.status == "Internal: failed to load 'm', failed to poll from model repository"
    return caplog.messages[-1].removeprefix("Poll failed for model directory 'm': ")


def test_a_model_may_name_no_agents(versioned: Repository, agents: Agents) -> None:
    write_version(versioned, "one", config=wants())
    with serve(versioned, agents, "m") as server:
        assert answer(server) == "one"


def test_an_agent_sees_the_whole_life_of_a_model(versioned: Repository, agents: Agents) -> None:
    agents.add("a")
    write_version(versioned, "one", config=wants("a"))
    with serve(versioned, agents, "m") as server:
        assert STAGE.events == ["a Initialize", "a ModelInitialize", "a LOAD", "initialize one", "a LOAD_COMPLETE"]
        assert server._loader.agents.table() == [("a", str(agents.root / "a" / "tritonrepoagent_a.py"))]
        STAGE.events.clear()
        server.unload_model("m")
        eventually(lambda: "a Finalize" in STAGE.events)
        assert STAGE.events == [
            "a UNLOAD",
            "finalize one",
            "a UNLOAD_COMPLETE",
            "a ModelFinalize",
            "a Finalize",
        ]


def test_a_load_that_fails_is_told(versioned: Repository, agents: Agents) -> None:
    agents.add("a")
    write_version(versioned, "bad", config=wants("a"))
    with serve(versioned, agents) as server:
        with pytest.raises(TritonError, match="weights missing"):
            server.load_model("m")
        assert [event for event in STAGE.events if event.startswith("a ")] == [
            "a Initialize",
            "a ModelInitialize",
            "a LOAD",
            "a LOAD_FAIL",
            "a ModelFinalize",
            "a Finalize",
        ]


def test_several_agents_are_asked_in_order_and_told_in_reverse(versioned: Repository, agents: Agents) -> None:
    agents.add("a")
    agents.add("b", file="repoagent.py")
    write_version(versioned, "one", config=wants("a", "b"))
    with serve(versioned, agents, "m"):
        pass
    told = [event for event in STAGE.events if event[0] in "ab" and "nitialize" not in event]
    assert told == [
        *("a LOAD", "b LOAD", "b LOAD_COMPLETE", "a LOAD_COMPLETE", "a UNLOAD", "b UNLOAD"),
        *("b UNLOAD_COMPLETE", "a UNLOAD_COMPLETE", "b ModelFinalize", "b Finalize", "a ModelFinalize", "a Finalize"),
    ]


def test_an_agent_that_refuses_keeps_the_model_from_loading(
    versioned: Repository, agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    agents.add("a")
    agents.add("b")
    write_version(versioned, "one", config=wants("a", "b", fail="LOAD"))
    with serve(versioned, agents) as server:
        assert refusal(server, caplog) == "the agent does not want to"
    assert STAGE.events == [
        *("a Initialize", "a ModelInitialize", "a LOAD", "a LOAD_FAIL", "a ModelFinalize", "a Finalize")
    ]


@pytest.mark.parametrize("late", ["LOAD_COMPLETE", "UNLOAD", "UNLOAD_COMPLETE", "ModelFinalize"])
def test_what_an_agent_fails_later_changes_nothing(
    versioned: Repository, agents: Agents, late: str, caplog: pytest.LogCaptureFixture
) -> None:
    agents.add("a")
    write_version(versioned, "one", config=wants("a", fail=late))
    with serve(versioned, agents, "m") as server:
        assert answer(server) == "one" and server.is_ready()
    assert STAGE.events[-1] == "a Finalize" and "the agent does not want to" in caplog.text


def test_versions_share_one_life_and_a_reload_is_another(versioned: Repository, agents: Agents) -> None:
    agents.add("a")
    config = f"version_policy {{ all {{}} }} {wants('a')}"
    write_version(versioned, "one", config=config)
    write_version(versioned, "two", version=2, config=config)
    with serve(versioned, agents, "m") as server:
        write_version(versioned, "three", version=2, config=config)
        server.load_model("m")
        eventually(lambda: "a UNLOAD_COMPLETE" in STAGE.events)
        assert [STAGE.events.count(f"a {what}") for what in ("LOAD", "LOAD_COMPLETE", "UNLOAD")] == [2, 2, 1]
        assert STAGE.events.count("a Initialize") == 1, "the agent is in use all the time"
        assert STAGE.events.index("a UNLOAD_COMPLETE") > max(map(STAGE.events.index, ("finalize one", "finalize two")))


def test_unload_complete_waits_for_requests(repository: Repository, agents: Agents) -> None:
    agents.add("a")
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep", wants("a"))
    with serve(repository, agents, "m") as server:
        client = send(server, "m", id="r")
        STAGE.wait("executed r")
        server.unload_model("m")
        eventually(lambda: STAGE.events[-1] == "a UNLOAD")
        _, request = STAGE.kept.pop()
        request.new_response().send(ResponseFlag.FINAL)
        request.release()
        client.responses()
        eventually(lambda: "a UNLOAD_COMPLETE" in STAGE.events)


def test_an_agent_may_bring_the_model_from_elsewhere(versioned: Repository, agents: Agents, tmp_path: Path) -> None:
    agents.add("fetch", FETCHER)
    source = tmp_path / "vault"
    (source / "1").mkdir(parents=True)
    (source / "1" / "text").write_text("from the vault")
    (versioned.models / "m").mkdir()
    versioned.model("m", "v", wants("fetch", **{"from": str(source)}), versions=())
    with serve(versioned, agents, "m") as server:
        (place,) = STAGE.kept
        assert answer(server) == "from the vault" and version_of(server, "m").directory == place
        server.unload_model("m")
        eventually(lambda: states(server) == [("1", "UNAVAILABLE", "unloaded")] and not place.exists())


def test_a_location_can_only_be_changed_while_loading(
    versioned: Repository, agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    agents.add(
        "late",
        "from llmbackend.core.repoagent_api import Action\n"
        "def TRITONREPOAGENT_ModelAction(agent, model, action):\n"
        "    if action is Action.LOAD_COMPLETE: model.update_location('/nowhere')\n",
    )
    write_version(versioned, "one", config=wants("late"))
    with serve(versioned, agents, "m"):
        assert (
            "location can only be updated during TRITONREPOAGENT_ACTION_LOAD, current action type is "
            "TRITONREPOAGENT_ACTION_LOAD_COMPLETE"
        ) in caplog.text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "unable to find 'libtritonrepoagent_a.so' or 'tritonrepoagent_a.py' for repo agent 'a', searched: "),
        ("x = 1", "unable to find required entrypoint 'TRITONREPOAGENT_ModelAction'"),
        ("import nonsense_that_is_not_there", "unable to load shared library: ModuleNotFoundError"),
        (AGENT.replace('note(agent, None, "Initialize")', 'exit("no")'), "SystemExit: no"),
    ],
)
def test_an_agent_that_can_not_be_loaded(
    versioned: Repository, agents: Agents, source: str | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    if source is not None:
        agents.add("a", source)
    write_version(versioned, "one", config=wants("a"))
    with serve(versioned, agents) as server:
        assert reason in refusal(server, caplog)


def test_a_name_can_not_leave_the_agent_directory(
    versioned: Repository, agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(versioned, "one", config=wants("../evil"))
    with serve(versioned, agents) as server:
        assert refusal(server, caplog) == "repo agent name '../evil' escapes the repository agent directory"


def test_an_unchanged_model_asks_no_agent_again(versioned: Repository, agents: Agents) -> None:
    agents.add("a")
    write_version(versioned, "one", config=wants("a"))
    with serve(versioned, agents, "m") as server:
        server.load_model("m")
        assert STAGE.events.count("a LOAD") == 1


def digest(algorithm: str, text: str = "one") -> str:
    return hashlib.new(algorithm, text.encode()).hexdigest()


@pytest.mark.parametrize("algorithm", ["MD5", "md5", "SHA256"])
def test_checksum_lets_the_right_files_load(versioned: Repository, agents: Agents, algorithm: str) -> None:
    write_version(versioned, "one", config=wants("checksum", **{f"{algorithm}:1/text": digest(algorithm)}))
    with serve(versioned, agents, "m") as server:
        assert answer(server) == "one"
        assert [name for name, _ in server._loader.agents.table()] == ["checksum"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("MD5:1/text", "0" * 32, f"Mismatched MD5 hash for file 1/text, expect: {'0' * 32}, got: {digest('md5')}"),
        ("SHA256:1/text", "", f"Mismatched SHA256 hash for file 1/text, expect: , got: {digest('sha256')}"),
        ("MD5:1/missing", "", "failed to open text file for read 1/missing: No such file or directory"),
        ("text", "", "failed to parse key: text"),
        ("CRC32:1/text", "", "Unsupported checksum algorithm: CRC32"),
        ("MD5:../n/1/text", "", "file ../n/1/text is outside of the model's directory"),
    ],
)
def test_checksum_refuses_other_files(
    versioned: Repository, agents: Agents, key: str, value: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(versioned, "one", config=wants("checksum", **{key: value}))
    with serve(versioned, agents) as server:
        assert refusal(server, caplog) == reason
        assert STAGE.events == []


def test_checksum_keeps_what_serves_when_a_file_is_tampered_with(versioned: Repository, agents: Agents) -> None:
    write_version(versioned, "one", config=wants("checksum", **{"SHA256:1/text": digest("sha256")}))
    with serve(versioned, agents, "m") as server:
        (versioned.models / "m" / "1" / "text").write_text("tampered")
        with pytest.raises(TritonError, match="failed to poll"):
            server.load_model("m")
        assert answer(server) == "one" and server.is_ready()


def test_checksum_judges_files_of_a_load_request_too(versioned: Repository, agents: Agents) -> None:
    def config(value: str) -> str:
        return (
            '{"backend":"v","model_repository_agents":{"agents":[{"name":"checksum","parameters":'
            f'{{"SHA256:1/text":"{value}"}}}}]}}}}'
        )

    with serve(versioned, agents) as server:
        with pytest.raises(TritonError, match="failed to poll"):
            server.load_model("m", {"config": config("00"), "file:1/text": b"one"})
        server.load_model("m", {"config": config(digest("sha256")), "file:1/text": b"one"})
        assert server.model_is_ready("m")
