"""From how many rows on torch's product of float8 rows takes a weight of some shape on this device.

For: 8-bit weights, which multiply fewer rows by the engine's own kernel. Does not know: models, how rows were rounded.
Scales by row are what the library supports least: users of torch 2.10 and newer report that it refuses few rows by a
long k on Hopper, and all shapes on compute capability 12.0. Invariant: a shape is tried once in a process, when it is
first multiplied by, which is before the engine takes requests and outside of captured graphs.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Final

import torch

logger = logging.getLogger(__name__)

NEVER: Final = sys.maxsize
_TRIED_ROWS = (1, 16, 32, 64, 128, 256, 257, 512, 2048)


@cache
def least_library_rows(n: int, k: int, device: torch.device) -> int:
    """For weights [n, k]; NEVER: the library takes none."""
    weight, least, why = torch.zeros((n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn), NEVER, ""
    for count in reversed(_TRIED_ROWS):
        if why := _why_refused(count, weight):
            break
        least = count
    if why:
        taken = "none" if least == NEVER else f"{least} rows and more"
        logger.warning("fp8 by [%d, %d]: torch takes %s, the engine's kernel the rest (%s)", n, k, taken, why)
    return least


def multiply_by_library(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> None:
    """out [T, n] = (x * x_scale) · (weight * scale[:, None])ᵀ; x_scale float32 [T, 1], scale float32 [n]."""
    torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=scale[None], out_dtype=out.dtype, out=out)


def _why_refused(count: int, weight: torch.Tensor) -> str:
    """A shape that a library refuses is a RuntimeError of the call; a lost device would be one of every call."""
    (n, k), device = weight.shape, weight.device
    x = torch.zeros((count, k), dtype=torch.uint8, device=device).view(weight.dtype)
    scales = torch.ones((count, 1), device=device), torch.ones(n, device=device)
    out = torch.empty((count, n), dtype=torch.bfloat16, device=device)
    try:
        multiply_by_library(x, scales[0], weight, scales[1], out)
        if weight.is_cuda:
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
