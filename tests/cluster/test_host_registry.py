"""HostRegistry: the hosts of a cluster, and what it keeps of those that have left."""

from __future__ import annotations

import msgspec
import pytest

from llmbackend.cluster import engine_watch
from llmbackend.cluster.engine_watch import HostRegistry
from llmbackend.cluster.messages import HostAddress, Versions


async def test_nothing_is_kept_of_hosts_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "NEWS_WAIT_S", 0.0)
    registry = HostRegistry()
    versions = msgspec.msgpack.encode(Versions(llmbackend="0.1.0", python="3.11.2", ray="2.60.0"))
    for name in ("left", "silent"):
        assert await registry.join(msgspec.msgpack.encode(HostAddress(name, "")), versions, "key") == ""
    await registry.leave("left")
    _, hosts = await registry.watch("left", -1)
    assert [msgspec.msgpack.decode(host, type=HostAddress).id for host in hosts] == ["silent"]
    monkeypatch.setattr(engine_watch, "LEASE_S", -1.0)
    assert (await registry.watch("left", -1))[1] == []
    assert not registry._heard_at_s
