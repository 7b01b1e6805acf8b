"""pb_utils under Triton's name for the module of its classes."""

import importlib

importlib.import_module("triton_python_backend_stub.pb_utils").make_importable()  # which takes this module's place
