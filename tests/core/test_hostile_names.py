"""Names, paths and configurations that clients invent: refused in words, and nothing is written or read elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmbackend.core.config.model_config import parse_json, parse_text
from llmbackend.core.config.model_config_rules import validate_config
from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.json_text import json_depth
from llmbackend.core.messages import LoadParameters
from llmbackend.core.repository.model_repository import check_load_parameters, check_model_name
from tests.helpers.core_host import ECHO_BACKEND, Repository, send, serving, version_of, x
from tests.helpers.waiting import eventually

CONFIG = '{"backend":"echo"}'
BAD_NAMES = {
    "": "must not be empty",
    ".": "path traversal",
    "..": "path traversal",
    ".../x": "path traversal",
    "../m": "path traversal",
    "a/b": "path traversal",
    "/etc": "path traversal",
    "a\\b": "path traversal",
    "a\0b": "unprintable",
    "a\nb": "unprintable",
    "\ud800": "unprintable",
    "x" * 256: "longer than 255 bytes",
    "é" * 128: "longer than 255 bytes",
    "x" * 10**6: "longer than 255 bytes",
}
BAD_PATHS = {
    "": "must stay inside",
    ".": "must stay inside",
    "..": "must stay inside",
    "../x": "must stay inside",
    "1/../../x": "must stay inside",
    "/": "must stay inside",
    "/../x": "must stay inside",
    "1\\..\\..\\x": "must stay inside",
    "1/a\0b": "unprintable",
    "1/\ud800": "unprintable",
    "x" * 256: "too long",
    "/".join("a" * 600): "too long",
}


@pytest.fixture
def echo(repository: Repository) -> Repository:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    return repository


def refused(server: InferenceServer, name: str, parameters: LoadParameters | None = None) -> TritonError:
    with pytest.raises(TritonError) as caught:
        server.load_model(name, parameters)
    return caught.value


def tree(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


def test_bad_names_are_refused_for_what_they_are(echo: Repository) -> None:
    with serving(echo, "m") as server:
        before = tree(echo.models.parent)
        for name, text in BAD_NAMES.items():
            error = refused(server, name)
            assert (error.code, text in error.message) == (ErrorCode.INVALID_ARG, True), error.message
            assert len(error.message) < 300 and error.message.isprintable()
            assert refused(server, name, {"config": CONFIG, "file:1/x": b"x"}).message == error.message
            with pytest.raises(TritonError):
                server.unload_model(name)
            with pytest.raises(TritonError) as unknown:
                send(server, name, id="i" * 10**6)
            assert len(unknown.value.message) < 1000
            with pytest.raises(TritonError):
                server.cancel_requests(name, -1, "a")
            assert not server.model_is_ready(name)
        assert tree(echo.models.parent) == before and server.check() == []


def test_bad_paths_are_refused_for_what_they_are(echo: Repository) -> None:
    with serving(echo, "m") as server:
        before = tree(echo.models.parent)
        for path, text in BAD_PATHS.items():
            error = refused(server, "up", {"config": CONFIG, f"file:{path}": b"x"})
            assert (error.code, text in error.message) == (ErrorCode.INTERNAL, True), error.message
            assert error.message.startswith("failed to load 'up', failed to poll from model repository: ")
            assert len(error.message) < 300
        error = refused(server, "up", {"config": CONFIG, "file:1/a": b"x", "file:1/a/b": b"x"})
        assert error.code is ErrorCode.INTERNAL
        assert ": file override path '1/a/b' cannot be written: " in error.message
        error = refused(server, "up", {"config": CONFIG, "file:1": b"x"})  # a file where the version should be
        assert error.code is ErrorCode.INVALID_ARG and "at least one version" in error.message
        assert tree(echo.models.parent) == before
        assert server.model_is_ready("m") and not server.model_is_ready("up")


def test_uploads_lie_in_one_directory_that_goes_with_the_server(echo: Repository) -> None:
    with serving(echo) as server:
        server.load_model("up", {"config": CONFIG + " ", "file:1/a/b.txt": b"x", "file:config.pbtxt": b"garbage {"})
        directory = version_of(server, "up").directory
        assert (directory / "1" / "a" / "b.txt").read_bytes() == b"x"
        refused(server, "up", {"config": CONFIG, "file:1/a": b"x", "file:1/a/b": b"x"})
        uploads = directory.parent.parent
        assert len([path for path in uploads.iterdir() if path.is_dir()]) == 1  # nothing of the refused one
    assert not uploads.exists()


def test_a_link_that_the_owner_made_is_followed(echo: Repository) -> None:
    (echo.models / "link").symlink_to(echo.models / "m")
    (echo.models / "m" / "config.pbtxt").write_text('backend: "echo" input { name: "X" data_type: TYPE_FP32 dims: -1 }')
    with serving(echo) as server:
        server.load_model("link")
        assert send(server, "link", x(1)).responses()[0].error is None


@pytest.mark.parametrize("depth", [101, 5000, 50_000])
@pytest.mark.parametrize("form", ["[", '{"a":', '{"parameters":{"a":'])
def test_a_deep_configuration_is_refused(echo: Repository, form: str, depth: int) -> None:
    with serving(echo, "m") as server:
        error = refused(server, "m", {"config": form * depth})
        assert error.status == (
            "Invalid argument: Invalid config override: JSON nesting depth exceeds maximum allowed limit (100)"
        )
        assert server.model_is_ready("m")


def test_a_huge_configuration_is_refused(echo: Repository) -> None:
    with serving(echo) as server:
        error = refused(server, "m", {"config": '{"backend":"' + "x" * (1 << 20) + '"}'})
        assert error.status == "Invalid argument: Invalid config override: larger than 1048576 bytes"


def test_brackets_in_strings_are_not_nesting() -> None:
    text = json.dumps({"a": '[{"\\' * 500, "b": [["\\\\", "]"]]})
    assert json_depth(text) == 3 and json_depth("") == 0 and json_depth(b"]]][") <= 1
    check_load_parameters("m", {"config": text})


@pytest.mark.parametrize(
    "config",
    [
        {"backend": "../../tmp/x"},
        {"backend": "echo", "runtime": "../../x.py"},
        {"backend": "echo", "runtime": "/etc/passwd"},
        {"backend": "echo", "default_model_filename": "../../m/1/x"},
        {"backend": "echo", "default_model_filename": "/etc/passwd"},
        {"backend": "echo", "default_model_filename": "a\0b"},
        {"backend": "echo", "instance_group": [{"count": 2**31 - 1}]},
        {"backend": "echo", "instance_group": [{"count": 600}, {"count": 600}]},
        {"backend": "echo", "name": "other"},
        {"backend": "echo", "version_policy": {"specific": {"versions": [2**63 - 1]}}},
        {"backend": "echo", "version_policy": {"latest": {"num_versions": 0}}},
        {"backend": "echo", "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-(2**63)]}]},
    ],
)
def test_a_configuration_that_reaches_outside_is_refused(echo: Repository, config: dict[str, object]) -> None:
    with serving(echo, "m") as server:
        error = refused(server, "m", {"config": json.dumps(config)})
        assert error.code in (ErrorCode.INVALID_ARG, ErrorCode.INTERNAL), error.status
        assert server.model_is_ready("m")


def test_versions_that_no_protocol_can_name_are_ignored(echo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    for name in (str(2**63), "9" * 200, "١", "1e3", "+1", "1 "):
        (echo.models / "m" / name).mkdir()
    with serving(echo, "m") as server:
        assert server.model_metadata("m").versions == ("1",)
    assert f"'{2**63}' which fails to convert to integral number" in caplog.text


# --- anything at all ------------------------------------------------------------------------------------------------

FIELDS = st.sampled_from(
    [
        *("backend", "name", "platform", "max_batch_size", "input", "output", "dims", "instance_group", "count"),
        *("dynamic_batching", "priority_levels", "priority_queue_policy", "parameters", "string_value", "kind"),
        *("version_policy", "latest", "num_versions"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS | st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.text() | st.text(alphabet="./\\\0a\n"))
def test_a_name_is_fine_or_an_invalid_argument(name: str) -> None:
    try:
        check_model_name(name)
    except TritonError as error:
        assert error.code is ErrorCode.INVALID_ARG
        return
    assert Path("/r", name).resolve().parent == Path("/r")
    name.encode()


@given(JSON.map(json.dumps) | st.text() | st.binary())
@example('{"max_batch_size": 1e400}')
@example('{"max_batch_size": ' + "9" * 5000 + "}")
@example('{"name": "\\ud800"}')
@example("[" * 1000)
def test_an_override_is_a_configuration_or_an_invalid_argument(text: str | bytes) -> None:
    try:
        check_load_parameters("m", {"config": text})
        config = parse_json(text)
        validate_config(config)
        config_to_json(config)
    except TritonError as error:
        assert error.code in (ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED) and len(error.message) < 1000


PBTXT = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", ":", ",", "<", ">", "-1", "1e999", "0x1F", '"a"', r'"\xff"', "'", "#", "\n", "\0"]
    )
    | FIELDS
    | st.text(max_size=5),
    max_size=40,
).map(" ".join)


@given(PBTXT)
@example('name: "\\xff\\xfe"')
@example("parameters { " * 5000)
@example("max_batch_size: " + "9" * 5000)
@example("[type.googleapis.com/x.Y] { " * 2000)
def test_a_configuration_file_is_a_configuration_or_an_internal_error(text: str) -> None:
    try:
        validate_config(parse_text(text, "config.pbtxt"))
    except TritonError as error:
        assert error.code in (ErrorCode.INTERNAL, ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED)


def test_one_bad_file_spoils_only_its_own_model(echo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    for index, content in enumerate((b"\xff\xfe", b'backend: "echo" name: "\\xff"', b"{" * 10**5, b"\0")):
        directory = echo.models / f"bad{index}"
        (directory / "1").mkdir(parents=True)
        (directory / "config.pbtxt").write_bytes(content)
    (echo.models / "directory").mkdir()
    (echo.models / "directory" / "config.pbtxt").mkdir()
    with serving(echo, model_control_mode="none", exit_on_error=False) as server:
        eventually(lambda: server.model_is_ready("m"))
        assert send(server, "m").responses()[0].error is None
        assert not any(server.model_is_ready(f"bad{index}") for index in range(4))
    assert max(map(len, caplog.messages)) < 1000
