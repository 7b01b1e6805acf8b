"""What meets another version is refused, with both versions in the error: stores, sealed texts, backends, clusters."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import llmbackend
from llmbackend import DEMO_MODEL
from llmbackend.adapter.text import tokenizer_loading
from llmbackend.cluster.engine_watch import HostRegistry
from llmbackend.cluster.messages import HostAddress, Versions
from llmbackend.core.backend_manager import check_extension_version
from llmbackend.core.errors import TritonError
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.process.served import remote_messages
from llmbackend.engine.process.served.remote_messages import PROTOCOL_VERSION, hello, refusal
from llmbackend.engine.weight_cache import cache, image_file
from llmbackend.fork_server.client import ForkServer, Program
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.journals.documents import Capacity, StoreError
from llmbackend.frontends.journals.redis_storage import RedisStorage
from llmbackend.frontends.openai.responses_api import background
from llmbackend.gguf import model_directory
from llmbackend.remote import host_endpoint, wire
from llmbackend.remote.remote_server import RemoteServer
from tests.helpers.kserve_scripted import start_host
from tests.remote.linked_host import served
from tests.upgrades.write_data import ENGINE
from trials.chaos.cluster.shared_store import shared_store


def test_a_store_in_redis_of_another_version(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis")
    with shared_store(tmp_path) as url, redis.Redis.from_url(url) as client:
        RedisStorage(url, Capacity(1 << 20, 9)).close()
        assert client.get("llmbackend:responses:version") == b"1"
        client.set("llmbackend:responses:version", 2)
        with pytest.raises(StoreError, match=r"has version 2, this server reads version 1; use another database"):
            RedisStorage(url, Capacity(1 << 20, 9))


def test_a_response_that_was_begun_in_another_format() -> None:
    begun: dict[str, Any] = {"body": {}, "history": ([], {}), "suffix": "", "created_s": 1}
    begun |= {"fingerprint": "", "seed": 1}
    assert background._decoded(msgspec.msgpack.encode(begun)).format == 1
    for stored in (msgspec.msgpack.encode(begun | {"format": 2}), msgspec.msgpack.encode({"other": 1}), b"\xff"):
        with pytest.raises(OpenAIError, match="another release of the server") as caught:
            background._decoded(stored)
        assert caught.value.status == 503


def test_a_text_that_was_sealed_in_another_format() -> None:
    data = base64.urlsafe_b64decode(FIXED_KEY.seal("a thought"))
    with pytest.raises(ValueError, match="sealed in format 2, this server reads format 1"):
        FIXED_KEY.unseal(base64.urlsafe_b64encode(b"\x02" + data[1:]).decode())


def test_a_backend_for_another_version_of_the_extensions(caplog: pytest.LogCaptureFixture) -> None:
    class Module:
        """Its attributes are those of a backend's module."""

    module: Any = Module()
    check_extension_version("b", module)
    module.LLMBACKEND_ModelInstanceKill = print
    check_extension_version("b", module)
    assert "'b' has LLMBACKEND_ModelInstanceKill, but no LLMBACKEND_API_VERSION" in caplog.text
    module.LLMBACKEND_API_VERSION = (1, 0)
    check_extension_version("b", module)
    for version in ((1, 1), (2, 0), (0, 9)):
        module.LLMBACKEND_API_VERSION = version
        needed = r"written for LLMBACKEND_API_VERSION {}\.{}, this server has 1\.0".format(*version)
        with pytest.raises(TritonError, match=needed):
            check_extension_version("b", module)
    for wrong in ("1.0", 1, ("1", "x")):
        module.LLMBACKEND_API_VERSION = wrong
        with pytest.raises(TritonError, match=r"LLMBACKEND_API_VERSION of backend 'b' is .*expected a pair of numbers"):
            check_extension_version("b", module)


def test_a_package_that_was_replaced_under_a_running_server(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text('__version__ = "99.0"\n')
    (tmp_path / "program.py").write_text("def prepare(): raise AssertionError\n")
    lines: list[str] = []
    server = ForkServer(Program("children", "new.program", package=("new", str(tmp_path))), lines.append)
    output, output_fd = os.pipe()
    child = server.fork("order", output_fd)
    os.close(output_fd)
    os.close(output)
    assert child.wait(20.0)
    ours = llmbackend.__version__
    assert f"has release 99.0 now, this server was started with {ours}: restart the server" in child.cause
    server.close()


def test_what_caches_hold_is_found_by_its_own_release_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = EngineConfig(model=str(DEMO_MODEL))
    gguf_file = tmp_path / "model.gguf"
    gguf_file.touch()

    def keys() -> list[str]:
        return [cache.key_of(model).digest, tokenizer_loading._key(DEMO_MODEL), model_directory._key([gguf_file])]

    ours = keys()
    assert keys() == ours
    monkeypatch.setattr(llmbackend, "__version__", "99.0")
    monkeypatch.setattr(tokenizer_loading, "__version__", "99.0")
    assert all(key != before for key, before in zip(keys(), ours, strict=True))
    with (tmp_path / "image").open("w+b") as image:
        image.write((b"llmbimg" + bytes([image_file.FORMAT + 1])).ljust(image_file.PAGE_BYTES, b"\0"))
        image.flush()
        with pytest.raises(image_file.ImageDamagedError, match="not an image of this version"):
            image_file._read_header(image.fileno())


# --- a cluster of two releases --------------------------------------------------------------------------------------


def test_an_engine_refuses_a_host_with_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    said = hello("north", ENGINE)
    assert refusal(said, ENGINE, "south") == ""
    monkeypatch.setattr(remote_messages, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    ours = llmbackend.__version__
    assert refusal(said, ENGINE, "south") == (
        f"host 'north' runs llmbackend {ours} (protocol {PROTOCOL_VERSION}), the engine on south llmbackend {ours} "
        f"(protocol {PROTOCOL_VERSION + 1}): all machines of a cluster must run the same release"
    )


def test_a_host_refuses_a_frontend_with_another_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = start_host(tmp_path)

    async def run() -> None:
        async with served(host, tmp_path, keys=None) as endpoint:
            monkeypatch.setattr(host_endpoint, "PROTOCOL", wire.PROTOCOL + 1)
            server = RemoteServer([endpoint.endpoint], keys=None, name="web 1")
            with pytest.raises(TritonError, match=r"frontend 'web 1' has .*\(protocol 1\), this host .*\(protocol 2\)"):
                await server.start(2)
            server.close()

    asyncio.run(run())
    assert host.stop(10)


def test_a_machine_with_another_release_does_not_join() -> None:
    def encoded(release: str) -> bytes:
        return msgspec.msgpack.encode(Versions(llmbackend=release, python="3.11.2", ray="2.60.0"))

    def joined(registry: HostRegistry, name: str, release: str) -> str:
        return asyncio.run(registry.join(msgspec.msgpack.encode(HostAddress(name, "")), encoded(release), "key"))

    registry = HostRegistry()
    assert joined(registry, "first", "0.1.0") == ""
    refused = joined(registry, "second", "0.2.0")
    assert "this machine has llmbackend 0.2.0" in refused and "the cluster has llmbackend 0.1.0" in refused
    asyncio.run(registry.leave("first"))
    assert joined(registry, "second", "0.2.0") == "", "a cluster that has stopped starts with the new release"
