"""llama.cpp's C interface: the declarations of llama-cpp-python without the package's own imports.

The environment names two folders: `LLAMA_CPP_LIB_PATH` that of the libraries, `LLAMA_CPP_BINDINGS` that of the
declarations.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any


def load() -> Any:
    """llama.cpp's log is left out."""
    package = types.ModuleType("llama_cpp")
    package.__path__ = [os.environ["LLAMA_CPP_BINDINGS"]]
    sys.modules["llama_cpp"] = package
    import llama_cpp.llama_cpp as lib

    lib.silent = lib.llama_log_callback(lambda level, text, data: None)  # is used as long as the library is
    lib.llama_log_set(lib.silent, None)
    lib.llama_backend_init()
    return lib
