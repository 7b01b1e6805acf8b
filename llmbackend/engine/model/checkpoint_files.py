"""What a checkpoint's files say about its tensors, read only from the headers of its safetensors or GGUF files.

Used by the adapter, which refuses a bad checkpoint at once, and by the loader before it allocates anything. Independent
of torch, transformers and model families. Invariant: the cost is that of the headers' own size, regardless of what
config.json or a header claims. Source: the safetensors format (8 bytes of header length, a JSON header, then the data).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.families import shapes_of
from llmbackend.gguf.files import SUFFIX, files_in
from llmbackend.gguf.model_directory import source_of

from ..errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

_COUNTS = frozenset({
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
})  # fmt: skip
"""Config fields that determine how many modules a model builds."""
_WIDTHS = frozenset({"hidden_size", "n_embd", "d_model", "vocab_size"})
"""Config fields that are dimensions of weights in every model."""
_INNER_WIDTHS = frozenset({"intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"})
"""Dimensions of weights that a model may not have; whether it does is known once it is built without memory."""
_MAX_INNER_WIDTH = 1 << 31
"""A model with larger ones cannot be built, even without memory."""
_HARMLESS_COUNT = 256
"""Up to this many modules cost nothing to build, and the comparison with the model itself names what is missing."""
_MAX_CONFIG_DEPTH = 8
_MADE_OF_GGUF = "F32"
"""The dequantized values of any type, before they are rounded to the model's type."""
PACKED_NUMBERS = {"compressed-tensors": "weight_packed", "gptq": "qweight", "awq": "qweight"}
"""By quant_method of a 4-bit checkpoint: the tensor that replaces a layer's weight."""
_INDEX = re.compile(r"(?:^|(?<=\.))\d{1,9}(?=\.)")


def bad_checkpoint(model: str, error: Exception) -> ValueError:
    """The error for the engine argument that names the checkpoint."""
    return ValueError(f"engine argument 'model' is '{source_of(model)}', a checkpoint that cannot be served: {error}")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    dtype: str
    """Its name in safetensors."""
    shape: tuple[int, ...]


class _Entry(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, _Entry])
_WEIGHT_MAP = msgspec.json.Decoder(_Index)


def check_directory(directory: Path) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint's directory by name.

    Raises CheckpointError naming file or field, value and what was expected, also if the numbers in config.json
    contradict the tensors' shapes.
    """
    try:
        config = config_fields((directory / "config.json").read_bytes())
    except OSError as error:
        raise CheckpointError(f"its config.json cannot be read: {error.strerror}") from None
    tensors = read_headers(weight_files(directory))
    check_numbers(config, tensors)
    return tensors


def config_fields(config_json: bytes) -> dict[str, Any]:
    """The fields of a config.json. Raises CheckpointError."""
    try:
        return msgspec.json.decode(config_json, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"its config.json is not a JSON object: {error}") from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers would read, or the parts of a GGUF model. Raises CheckpointError if there
    are none, or if the index names missing files."""
    stated = _stated_weights(directory)
    candidates = [stated] if stated else [WEIGHTS_FILE, INDEX_FILE]
    name = next((name for name in candidates if (directory / name).is_file()), None)
    if name is None and (files := _gguf_files(directory)):
        return files
    if name is None:
        raise CheckpointError(f"it contains no safetensors file {' or '.join(map(_short, candidates))}")
    if not name.endswith(".index.json"):
        return [directory / name]
    try:
        names = sorted(set(_WEIGHT_MAP.decode((directory / name).read_bytes()).weight_map.values()))
    except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"its {name} cannot be read: {error}") from None
    if outside := [shard for shard in names if _is_outside(shard)]:
        raise CheckpointError(f"its {name} names files outside of its directory: {few(outside)}")
    if absent := [shard for shard in names if not (directory / shard).is_file()]:
        raise CheckpointError(f"its {name} names files that are missing: {few(absent)}")
    return [directory / shard for shard in names]


def _stated_weights(directory: Path) -> str:
    """The name of the weights' file in a config.json; "" = it states none, or there is no such file."""
    path = directory / "config.json"
    name = str(config_fields(path.read_bytes()).get("transformers_weights") or "") if path.is_file() else ""
    if _is_outside(name):
        raise CheckpointError(
            f"its config.json states transformers_weights '{_short(name)}', expected a file inside of its directory"
        )
    return name


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


def has_four_bits(directory: Path) -> bool:
    """Whether a directory's config.json and tensors say that linear layers are stored in 4 bits. Raises CheckpointError
    or OSError."""
    stated = config_fields((directory / "config.json").read_bytes()).get("quantization_config")
    name = PACKED_NUMBERS.get(str(stated.get("quant_method"))) if isinstance(stated, dict) else None
    if name is None:
        return False
    return any(tensor.endswith(f".{name}") for tensor in read_headers(weight_files(directory)))


def are_gguf(files: Sequence[Path]) -> bool:
    return bool(files) and files[0].suffix == SUFFIX


def _gguf_files(directory: Path) -> list[Path]:
    try:
        return files_in(directory)
    except GgufError as error:
        raise CheckpointError(str(error)) from None


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """All tensors by the model's names. Raises CheckpointError naming the file."""
    if are_gguf(files):
        return _read_gguf(files)
    tensors: dict[str, TensorHeader] = {}
    for path in files:
        try:
            tensors |= _read_header(path)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise CheckpointError(f"the weights cannot be read: {path.name} is not safetensors: {error}") from None
    return tensors


def _read_gguf(files: Sequence[Path]) -> dict[str, TensorHeader]:
    try:
        shapes = shapes_of(files)
    except GgufError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{files[0].name} cannot be read: {error.strerror}") from None
    return {name: TensorHeader(_MADE_OF_GGUF, shape) for name, shape in shapes.items()}


def _read_header(path: Path) -> dict[str, TensorHeader]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little") if size_bytes >= 8 else 0
        if not 2 <= header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"the weights cannot be read: {path.name} states a header of {header_bytes} bytes, expected 2 to "
                f"{max(min(size_bytes - 8, MAX_HEADER_BYTES), 2)}: it is truncated, or not a safetensors file"
            )
        entries = _HEADER.decode(file.read(header_bytes))
    entries.pop("__metadata__", None)
    data_bytes = size_bytes - 8 - header_bytes
    for name, entry in entries.items():
        _check_entry(path.name, name, entry, data_bytes)
    return {name: TensorHeader(entry.dtype, entry.shape) for name, entry in entries.items()}


def _check_entry(file: str, name: str, entry: _Entry, data_bytes: int) -> None:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= data_bytes:
        raise CheckpointError(
            f"the weights cannot be read: {file} places tensor '{_short(name)}' at bytes {begin} to {end} of its data, "
            f"which has {data_bytes}: the file is truncated"
        )
    item_bits = _ITEM_BITS.get(entry.dtype)
    if item_bits is None:
        raise CheckpointError(f"{file} has tensor '{_short(name)}' of the unknown type '{_short(entry.dtype)}'")
    if any(size < 0 for size in entry.shape) or len(entry.shape) > 16:
        raise CheckpointError(f"{file} has tensor '{_short(name)}' with an impossible shape")
    if math.prod(entry.shape) * item_bits != 8 * (end - begin):
        raise CheckpointError(
            f"{file} gives tensor '{_short(name)}' of shape {list(entry.shape)} and type {entry.dtype} "
            f"{end - begin} bytes, expected {math.prod(entry.shape) * item_bits // 8}"
        )


def check_numbers(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    """Raises CheckpointError if config.json describes a model far larger than the tensors, because modules are built
    and memory is allocated by these numbers. config: the parsed file, nested configs included."""
    num_modules = _largest_count(tensors)
    largest_dimension = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for name, value in _numbers(config, 0):
        if name in _COUNTS and value > max(num_modules, _HARMLESS_COUNT):
            of_experts = "expert" in name and value <= largest_dimension
            if not of_experts:
                raise CheckpointError(
                    f"its config.json states {name} {value}, but its tensors belong to {num_modules} layers or experts"
                )
        if name in _WIDTHS and value > max(largest_dimension, _HARMLESS_COUNT):
            raise _too_wide(name, value, largest_dimension)
        if name in _INNER_WIDTHS and value > _MAX_INNER_WIDTH:
            raise _too_wide(name, value, largest_dimension)


def check_inner_widths(
    config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], dimensions: Collection[int]
) -> None:
    """As `check_numbers`, for widths that only some models use. dimensions: of all weights of the model that config
    describes."""
    largest_dimension = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for name, value in _numbers(config, 0):
        is_wide = name in _INNER_WIDTHS and value > max(largest_dimension, _HARMLESS_COUNT)
        if is_wide and any(size % value == 0 for size in dimensions):
            raise _too_wide(name, value, largest_dimension)


def _too_wide(name: str, value: int, largest_dimension: int) -> CheckpointError:
    return CheckpointError(
        f"its config.json states {name} {value}, but the largest dimension of its tensors is {largest_dimension}"
    )


def _numbers(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value
        elif isinstance(value, Mapping) and depth < _MAX_CONFIG_DEPTH:
            yield from _numbers(value, depth + 1)


def _largest_count(names: Iterable[str]) -> int:
    """The length of the longest module list in the tensors' names: in 'model.layers.3.mlp…', the list is
    'model.layers'."""
    indices: dict[str, set[str]] = {}
    for name in names:
        for match in _INDEX.finditer(name):
            indices.setdefault(name[: match.start()], set()).add(match.group())
    return max(map(len, indices.values()), default=0)


def few(names: Iterable[str], most: int = 5) -> str:
    """Names for a message: the first few, and how many more there are."""
    listed = list(names)
    shown = ", ".join(_short(name) for name in listed[:most])
    return f"{shown} and {len(listed) - most} more" if len(listed) > most else shown


def _short(name: str) -> str:
    return name if len(name) <= 120 else f"{name[:117]}..."
