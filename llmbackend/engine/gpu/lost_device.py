"""Whether an accelerator still works after an error.

For: the runners that compute on one. Does not know: steps, processes. A kernel that fails (an illegal address, an
assertion, a hardware error) takes the device from its whole process: each later call fails with the same error, and
only another process helps. Other errors, the lack of memory among them, concern one call. Invariant: an error behind
which the device does not work leaves a runner as DeviceLostError, so that no row is blamed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..errors import DeviceLostError

_NO_MEMORY = 2
"""cudaErrorMemoryAllocation: of what torch's allocator does not hand out, such as pinned memory."""


@contextmanager
def noticing_loss(synchronize: Callable[[], None]) -> Iterator[None]:
    """An exception inside is raised as it is where the device still works. synchronize: waits for the device, and
    raises where it is lost; libraries report a lost device as errors of their own kinds."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _NO_MEMORY:
            raise _lost(error) from error
        try:
            synchronize()
        except Exception as loss:
            raise _lost(loss) from error
        raise


def _lost(error: Exception) -> DeviceLostError:
    return DeviceLostError(f"the device is lost to this process: {str(error).partition(chr(10))[0]}")
