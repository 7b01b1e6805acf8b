"""Sealed reasoning: it comes back as it was, or not at all."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path
from random import Random

import pytest
import typer

from llmbackend.cli.flags.endpoints import ProtocolFlags
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY, SealingKey, sealing_key

OWN = SealingKey(b"another key of sixteen bytes or more")


@pytest.mark.parametrize("key", [FIXED_KEY, OWN], ids=["fixed", "own"])
@pytest.mark.parametrize("text", ["", "a", "Zürich 🙂\n", "x" * 100_000, "\x00\x00leading zeros"])
def test_a_sealed_text_comes_back(key: SealingKey, text: str) -> None:
    sealed = key.seal(text)
    assert key.unseal(sealed) == text
    assert key.seal(text) == sealed
    assert len(text) < 5 or text not in sealed


def test_equal_lengths_do_not_share_a_mask() -> None:
    first, second = (urlsafe_b64decode(FIXED_KEY.seal(text))[33:] for text in ("aaaaaaaa", "bbbbbbbb"))
    assert bytes(a ^ b for a, b in zip(first, second, strict=True)) != b"\x03" * 8


def test_another_key_does_not_open_it() -> None:
    with pytest.raises(ValueError, match="another key, or altered"):
        OWN.unseal(FIXED_KEY.seal("secret"))


def test_every_altered_byte_is_noticed() -> None:
    data = urlsafe_b64decode(OWN.seal("I think that 2 + 2 is 4."))
    random = Random(1)
    for index in range(len(data)):
        altered = bytearray(data)
        altered[index] ^= random.randint(1, 255)
        with pytest.raises(ValueError):
            OWN.unseal(urlsafe_b64encode(bytes(altered)).decode())
    for size in range(len(data)):
        with pytest.raises(ValueError):
            OWN.unseal(urlsafe_b64encode(data[:size]).decode())


@pytest.mark.parametrize("sealed", ["", "sealed", "%%%", "ü" * 80, "A" * 3, "A" * 200])
def test_other_texts_are_refused(sealed: str) -> None:
    with pytest.raises(ValueError):
        FIXED_KEY.unseal(sealed)


def test_a_key_is_not_shown() -> None:
    assert "sixteen" not in repr(OWN)


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(OWN.secret + b"\n")
    secret = ProtocolFlags(reasoning_key_file=path).options().reasoning_secret
    assert sealing_key(secret) == OWN
    assert sealing_key(ProtocolFlags().options().reasoning_secret) is FIXED_KEY
    path.write_bytes(b"short")
    with pytest.raises(typer.BadParameter, match="has 5 bytes, expected at least 16"):
        ProtocolFlags(reasoning_key_file=path).options()
    with pytest.raises(typer.BadParameter, match="No such file"):
        ProtocolFlags(reasoning_key_file=tmp_path / "nosuch").options()
