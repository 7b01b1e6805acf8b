"""pb_utils under the name that models import."""

import importlib

importlib.import_module("triton_python_backend_stub.pb_utils").make_importable()  # which takes this module's place
