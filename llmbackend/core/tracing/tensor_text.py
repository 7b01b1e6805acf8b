"""A tensor as Triton writes it into a trace: four strings.

For: traces of level TENSORS. Does not know: traces. Invariant: the text is made at once, since a tensor may lie in
memory that its client writes to again. Source: TraceManager::TraceTensorActivity, which prints numbers with six
significant digits and quotes strings; by design different: UINT8 as numbers (not characters), FP16 and BF16 too (not
nothing), and text that JSON can carry whatever the bytes are.
"""

from __future__ import annotations

from typing import Any

from ..tensors import Tensor


def tensor_fields(tensor: Tensor) -> dict[str, str]:
    return {
        "name": tensor.name,
        "data": ",".join(map(_formatter(tensor.datatype), tensor.data.ravel().tolist())),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }


def _formatter(datatype: str) -> Any:
    if datatype == "BYTES":
        return lambda value: f'"{value.decode("utf-8", "replace") if isinstance(value, bytes) else value}"'
    if datatype.startswith(("FP", "BF")):
        return lambda value: f"{value:g}"
    return lambda value: str(int(value))
