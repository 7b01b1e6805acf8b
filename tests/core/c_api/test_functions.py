"""The exported functions against a list of the published API's (functions.txt: the names that Triton 2.51 exports)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from llmbackend.core.c_api import host_calls
from llmbackend.core.c_api.library import _empty_library, api

NAMES = Path(__file__).with_name("functions.txt").read_text().split()
UNSUPPORTED = Path(host_calls.__file__).with_name("native") / "unsupported.cpp"


def test_every_function_is_exported() -> None:
    library = ctypes.CDLL(api().__file__)
    assert [name for name in NAMES if not hasattr(library, name)] == []


def test_what_is_not_supported_says_so_by_name() -> None:
    library = ctypes.CDLL(api().__file__)
    library.TRITONSERVER_ErrorMessage.restype = ctypes.c_char_p
    library.TRITONSERVER_ErrorMessage.argtypes = library.TRITONSERVER_ErrorCode.argtypes = [ctypes.c_void_p]
    for line in UNSUPPORTED.read_text().splitlines():
        if line.startswith("UNSUPPORTED("):
            name = line.removeprefix("UNSUPPORTED(").removesuffix(")")
            function = getattr(library, name)
            function.restype = ctypes.c_void_p
            error = function()
            assert library.TRITONSERVER_ErrorCode(error) == 5
            assert library.TRITONSERVER_ErrorMessage(error).decode() == f"{name} is not supported by this server"


def test_a_stand_in_is_found_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "any.so"
    file.write_bytes(_empty_library("libtritonserver-0123abcd.so"))
    kept = ctypes.CDLL(str(file))
    assert ctypes.CDLL("libtritonserver-0123abcd.so")._handle == kept._handle
