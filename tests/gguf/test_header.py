"""A damaged or hostile header is refused by the field or tensor that is wrong, before memory is taken for it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.files import file_in, parts_of, read_parts
from llmbackend.gguf.header import Header, Strings, read_header
from llmbackend.gguf.model_directory import gguf_files, model_directory
from tests.helpers.gguf_files import llama_fields, write_fields

MUTATIONS = 300
NUMBERS = (0, 1, 255, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
TYPES = (0, 1, 7, 8, 9, 12, 13, 1 << 31, (1 << 32) - 1)
STRING, ARRAY, UINT32, UINT64 = 8, 9, 4, 10
F32, Q4_0, IQ2_XXS = 0, 2, 16


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return text(name) + numbers


def write(
    path: Path, fields: list[bytes], tensors: list[bytes], data: int = 4096, version: int = 3, padding: bool = True
) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields + tensors)
    header += bytes(-len(header) % 32 if padding else 0)
    path.write_bytes(header + bytes(data))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(GgufError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path.name}")
    assert "\n" not in message
    assert len(message) < 1000
    return message


NAME = field("general.architecture", STRING, text("llama"))
ONE = tensor("a", (8, 4))

HOSTILE: dict[str, tuple[list[bytes], list[bytes], str]] = {
    "a string beyond the file": (
        [field("x", STRING, struct.pack("<Q", 1 << 40) + b"abc")],
        [],
        "its field 'x' has 1099511627776 bytes, expected at most",
    ),
    "a name beyond the limit": ([struct.pack("<Q", 1 << 20) + b"x" * 2000], [], "the name of a field has 1048576"),
    "a name that is not UTF-8": ([field("x", UINT32, bytes(4)).replace(b"x", b"\xff")], [], "is not UTF-8"),
    "an empty name": ([field("", UINT32, bytes(4))], [], "the name of a field is empty"),
    "a text that is not UTF-8": ([field("x", STRING, text(b"\xff\xfe"))], [], "its field 'x' is not UTF-8"),
    "an unknown type": ([field("x", 77, bytes(4))], [], "its field 'x' is of the unknown type 77"),
    "a field that is there twice": ([field("x", UINT32, bytes(4))] * 2, [], "its field 'x' appears twice"),
    "a list of lists": (
        [field("x", ARRAY, struct.pack("<IQIQ", ARRAY, 1, UINT32, 0))],
        [],
        "its field 'x' is a list of lists, expected numbers or strings",
    ),
    "a list of nothing known": (
        [field("x", ARRAY, struct.pack("<IQ", 55, 1))],
        [],
        "its field 'x' is a list of type 55, expected numbers or strings",
    ),
    "a long list of numbers": ([field("x", ARRAY, struct.pack("<IQ", UINT64, 1 << 60))], [], "goes beyond the end"),
    "a long list of strings": ([field("x", ARRAY, struct.pack("<IQ", STRING, 1 << 60))], [], "strings, expected at"),
    "strings beyond the file": ([field("x", ARRAY, struct.pack("<IQ", STRING, 1 << 20))], [], "goes beyond the end"),
    "a string in a list beyond the file": (
        [field("x", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 62))],
        [],
        "its field 'x' goes beyond the end",
    ),
    "an alignment of 0": ([field("general.alignment", UINT32, bytes(4))], [ONE], "is 0, expected a power of 2"),
    "an alignment of 24": (
        [field("general.alignment", UINT32, struct.pack("<I", 24))],
        [ONE],
        "its field 'general.alignment' is 24, expected a power of 2",
    ),
    "an alignment that is a text": (
        [field("general.alignment", STRING, text("32"))],
        [ONE],
        "its field 'general.alignment' is '32', expected a power of 2",
    ),
    "no dimensions": ([], [tensor("a", ())], "its tensor 'a' has 0 dimensions, expected 1 to 4"),
    "many dimensions": ([], [tensor("a", (1,) * 9)], "its tensor 'a' has 9 dimensions, expected 1 to 4"),
    "a dimension of 0": ([], [tensor("a", (8, 0))], "its tensor 'a' has the shape [0, 8], expected dimensions of"),
    "more numbers than any memory": ([], [tensor("a", (1 << 62,) * 4)], "its tensor 'a' ends at byte"),
    "half a block": ([], [tensor("a", (40, 2), Q4_0)], "has rows of 40 numbers, expected a multiple of 32 (Q4_0)"),
    "a type that is not read": ([], [tensor("a", (256, 2), IQ2_XXS)], "its tensor 'a' is of type IQ2_XXS, expected"),
    "an unknown type of tensor": ([], [tensor("a", (256, 2), 999)], "its tensor 'a' is of type number 999, expected"),
    "an offset between": ([], [tensor("a", (8, 4), F32, 4)], "begins at 4, expected a multiple of the alignment, 32"),
    "an offset beyond the file": ([], [tensor("a", (8, 4), F32, 1 << 50)], "it is truncated"),
    "tensors that overlap": (
        [],
        [tensor("a", (64, 4)), tensor("b", (8, 4), F32, 64)],
        "its tensors 'a' and 'b' overlap",
    ),
    "a tensor that is there twice": ([], [ONE, ONE], "its tensor 'a' appears twice"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    fields, tensors, expected = HOSTILE[kind]
    path = write(tmp_path / "bad.gguf", [NAME, *fields], tensors)
    tracemalloc.start()
    try:
        assert expected in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_first_bytes_decide_what_a_file_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", [NAME], [ONE], version=1)
    assert "its version is 1, expected 2 or 3" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in refusal(path)
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"GGU"):
        path.write_bytes(content)
        assert "is not a GGUF file" in refusal(path)


def test_counts_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for tensors, fields, what in ((1 << 62, 0, "tensors"), (0, 1 << 62, "fields")):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields))
        assert f"its number of {what} is {1 << 62}, expected at most" in refusal(path)


def test_a_file_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", [NAME, field("x", STRING, text("y"))], [tensor("a", (8, 4))], data=128)
    content = whole.read_bytes()
    read_header(whole)
    cut = tmp_path / "cut.gguf"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        refusal(cut)


def model(path: Path) -> Path:
    """That can be served, with a tokenizer of each kind of field."""
    rows = np.zeros((3, 8))
    fields = llama_fields(tokenizer__ggml__token_type=[1, 1, 1], tokenizer__ggml__bos_token_id=0)
    fields |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ messages }}"}
    return write_fields(path, fields, {"token_embd.weight": rows, "output_norm.weight": rows[0]})


def mutated(content: bytes, draw: random.Random) -> bytes:
    """With a few changes that a program may trip over."""
    raw = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(4, len(raw))
        kind = draw.randrange(5)
        if kind == 0:
            raw[place] = draw.randrange(256)
        elif kind == 1:
            raw[place : place + 8] = struct.pack("<Q", draw.choice(NUMBERS))
        elif kind == 2:
            raw[place : place + 4] = struct.pack("<I", draw.choice(TYPES))
        elif kind == 3:
            del raw[place : place + draw.randint(1, 40)]
        else:
            raw[place:place] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 20)))
    return bytes(raw)


def fuzz(tmp_path: Path, count: int, seed: int) -> int:
    """Reads mutated files in every way; how many were read without an error. No exception but GgufError is one."""
    content = model(tmp_path / "good.gguf").read_bytes()
    draw, path, served = random.Random(seed), tmp_path / "bad.gguf", 0
    for number in range(count):
        path.write_bytes(mutated(content, draw))
        try:
            header = read_header(path)
            _decode(header)
            model_directory(gguf_files(path), tmp_path / f"made{number}")
            served += 1
        except GgufError as error:
            assert "\n" not in str(error)
    return served


def _decode(header: Header) -> None:
    for name, value in header.fields.items():
        if isinstance(value, Strings):
            value.decoded(name)


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    assert 0 < fuzz(tmp_path, MUTATIONS, seed=3) < MUTATIONS


# --- parts ------------------------------------------------------------------------------------------------------------


def part(folder: Path, number: int, count: int, edit: Callable[[dict[str, object]], object] = bool) -> Path:
    fields = llama_fields() | {"split.no": number - 1, "split.count": count, "split.tensors.count": count}
    edit(fields)
    name = f"m-{number:05}-of-{count:05}.gguf"
    return write_fields(folder / name, fields, {f"blk.0.part{number}.weight": np.zeros((4, 8))})


def test_parts_are_found_from_any_of_them(tmp_path: Path) -> None:
    parts = [part(tmp_path, number, 3) for number in (1, 2, 3)]
    assert all(parts_of(path) == parts for path in parts)
    assert gguf_files(tmp_path) == parts
    assert len(read_parts(parts).tensors) == 3


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    part(tmp_path, 1, 3)
    with pytest.raises(GgufError, match=r"one of 3 parts, of which are missing: m-00002-of-00003.gguf, m-00003"):
        gguf_files(tmp_path)


def test_parts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    parts = [part(tmp_path, 1, 2, lambda fields: fields.update({"split.count": 7})), part(tmp_path, 2, 2)]
    with pytest.raises(GgufError, match=r"'split.count' is 7, but there are 2 files"):
        read_parts(parts)
    parts[0] = part(tmp_path, 1, 2, lambda fields: fields.update({"split.tensors.count": 9}))
    with pytest.raises(GgufError, match=r"'split.tensors.count' is 9, but its parts have 2"):
        read_parts(parts)


def test_a_directory_of_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "mmproj-c"):
        model(tmp_path / f"{name}.gguf")
    with pytest.raises(GgufError, match=r"contains 2 GGUF models, expected 1; name one of its files: a.gguf, b.gguf"):
        file_in(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert file_in(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "model.safetensors").touch()
    assert file_in(tmp_path) is None
