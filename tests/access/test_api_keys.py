"""Keys: their file, the account of a presented key, reading the file again."""

from __future__ import annotations

import logging
import os
import tracemalloc
from pathlib import Path

import pytest

from llmbackend.frontends.access.access_control import key_ring
from llmbackend.frontends.access.api_keys import KeyFile, KeyRing, digest_of, parse_keys, unnamed_keys
from llmbackend.frontends.access.permissions import Role
from llmbackend.frontends.access.rate_limit import Limits
from llmbackend.frontends.access.settings import AccessSettings
from tests.helpers.fake_clock import FakeClock

DEFAULTS = Limits(requests=10, tokens=20)


def name_of(ring: KeyRing, key: str) -> str | None:
    account = ring.find(key.encode())
    return None if account is None else account.name


def write(path: Path, text: str) -> None:
    """Writes, and sets a later time of change: two writes within one tick of the file system's clock look the same."""
    before_ns = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before_ns + 10**9, before_ns + 10**9))


def test_lines_of_a_key_file() -> None:
    text = (
        "# team keys\n\nalice:sk-1\n  bob:sk:2 rpm=5\ncarol:sk-3  tpm=7 rpm=0 \nroot:sk-4 concurrency=3 role=operator"
    )
    alice, bob, carol, root = parse_keys(text, DEFAULTS)
    assert (alice.name, alice.digest, alice.limits) == ("alice", digest_of("sk-1"), DEFAULTS)
    assert (bob.name, bob.digest, bob.limits) == ("bob", digest_of("sk:2"), Limits(5, 20))
    assert carol.limits == Limits(0, 7)
    assert root.limits == Limits(10, 20, 3)
    assert [key.role for key in (alice, bob, carol, root)] == [Role.USER, Role.USER, Role.USER, Role.OPERATOR]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("secret-without-a-name", "expected name:key"),
        (":secret", "expected name:key"),
        ("a b:secret", "expected name:key"),
        ("ali$ce:secret", "expected name:key"),
        ("alice:", "a key is 1 to 512 visible ASCII"),
        ("alice:s€cret", "a key is 1 to 512 visible ASCII"),
        ("alice:secret rpm=-1", "expected rpm="),
        ("alice:secret rpm=1.5", "expected rpm="),
        ("alice:secret burst=3", "expected rpm="),
        ("alice:secret role=admin", "expected rpm=.* or role=user|operator"),
        ("alice:secret concurrency=many", "expected rpm="),
    ],
)
def test_a_wrong_line_is_named_without_the_key(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^line 2: {complaint}") as error:
        parse_keys(f"# first\n{line}\n", DEFAULTS)
    assert "secret" not in str(error.value) and "s€cret" not in str(error.value)


def test_two_keys_of_one_name_and_one_key_of_two_names_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a:1\na:2\n")
    with pytest.raises(ValueError, match="the name 'a' occurs twice"):
        KeyRing((), KeyFile(file, DEFAULTS))
    file.write_text("a:1\nb:1\n")
    with pytest.raises(ValueError, match="the key of 'b' occurs twice"):
        KeyRing((), KeyFile(file, DEFAULTS))


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "broken", b"\xff\xfe:x"])
def test_a_server_does_not_start_without_good_keys(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="API key file"):
        KeyRing((), KeyFile(file, DEFAULTS))


def test_keys_of_all_three_sources_open(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("filed:sk-file\n")
    ring = key_ring(
        AccessSettings(api_key_file=file, api_keys=("sk-1", "sk-2"), environment_keys="env:sk-env rpm=3, env2:sk-env2")
    )
    found = [name_of(ring, key) for key in ("sk-file", "sk-1", "sk-2", "sk-env", "sk-env2", "sk-", "sk-file ", "")]
    assert found == ["filed", "api-key-1", "api-key-2", "env", "env2", None, None, None]
    assert not ring.has_operator


def test_keys_share_caches_only_with_the_option() -> None:
    for shares, names in ((False, ["api-key-1", "api-key-2"]), (True, ["", ""])):
        ring = key_ring(AccessSettings(api_keys=("sk-1", "sk-2"), share_caches=shares))
        tenants = [account.tenant for key in (b"sk-1", b"sk-2") if (account := ring.find(key))]
        assert [tenant.cache_name for tenant in tenants] == names
        assert [tenant.key_name for tenant in tenants] == ["api-key-1", "api-key-2"]


def test_a_key_given_another_role_has_it_at_once(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", FakeClock()
    write(file, "a:sk-a\n")
    ring = KeyRing((), KeyFile(file, DEFAULTS), clock)
    account = ring.find(b"sk-a")
    assert account is not None and account.is_only_one and not account.tenant.is_operator
    write(file, "a:sk-a role=operator\nb:sk-b\n")
    clock.now_s += 1
    account = ring.find(b"sk-a")
    assert account is not None and account.tenant.is_operator and not account.is_only_one and ring.has_operator


def test_a_changed_file_is_read_again_once_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", FakeClock()
    write(file, "old:sk-old\n")
    ring = KeyRing((), KeyFile(file, DEFAULTS), clock)
    write(file, "new:sk-new\n")
    assert name_of(ring, "sk-new") is None, "not looked at within the second"
    clock.now_s += 1
    assert (name_of(ring, "sk-new"), name_of(ring, "sk-old")) == ("new", None)


def test_a_broken_file_leaves_the_last_keys_valid_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", FakeClock()
    write(file, "a:sk-a\n")
    ring = KeyRing((), KeyFile(file, DEFAULTS), clock)
    for text in ("a:sk-a\nnonsense", "", None):
        caplog.clear()
        if text is None:
            file.unlink()
        else:
            write(file, text)
        for _ in range(3):
            clock.now_s += 1
            assert name_of(ring, "sk-a") == "a"
        (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
        assert str(file) in record.message and "remain in use" in record.message
    write(file, "b:sk-b\n")
    clock.now_s += 1
    assert (name_of(ring, "sk-a"), name_of(ring, "sk-b")) == (None, "b")


def test_an_account_outlives_a_reload_but_not_a_change_of_its_key_or_limits(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", FakeClock()
    write(file, "a:sk-a rpm=1\nb:sk-b rpm=1\nc:sk-c rpm=1\n")
    ring = KeyRing((), KeyFile(file, DEFAULTS), clock)
    before = {key: ring.find(key.encode()) for key in ("sk-a", "sk-b", "sk-c")}
    write(file, "a:sk-rotated rpm=1\nb:sk-b rpm=2\nc:sk-c rpm=1\n")
    clock.now_s += 1
    assert ring.find(b"sk-rotated") is not before["sk-a"]
    assert ring.find(b"sk-b") is not before["sk-b"]
    assert ring.find(b"sk-c") is before["sk-c"]


def test_wrong_keys_are_not_stored() -> None:
    ring = KeyRing(unnamed_keys(["right"], DEFAULTS))
    for number in range(1000):
        ring.find(b"warm %d" % number)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100_000):
            assert ring.find(b"wrong %d" % number) is None
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000


def test_what_is_stored_belongs_to_the_key_whatever_its_name_and_place() -> None:
    def owner(ring: KeyRing, key: str) -> str:
        account = ring.find(key.encode())
        assert account is not None
        return account.owner

    both, one = (KeyRing(unnamed_keys(keys, DEFAULTS)) for keys in (("sk-a", "sk-b"), ("sk-b",)))
    assert owner(both, "sk-a") != owner(both, "sk-b") == owner(one, "sk-b")
    assert owner(KeyRing(parse_keys("alice:sk-b", DEFAULTS)), "sk-b") == owner(one, "sk-b")
    assert "sk-b" not in owner(one, "sk-b") and digest_of("sk-b").hex()[:16] not in owner(one, "sk-b")


def test_a_name_that_gets_another_key_gets_another_owner(tmp_path: Path) -> None:
    write(tmp_path / "keys", "alice:sk-1\n")
    clock = FakeClock()
    ring = KeyRing([], KeyFile(tmp_path / "keys", DEFAULTS), clock)
    before = ring.find(b"sk-1")
    write(tmp_path / "keys", "alice:sk-2\n")
    ring.reload()
    after = ring.find(b"sk-2")
    assert before is not None and after is not None and before.owner != after.owner
