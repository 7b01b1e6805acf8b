"""Which engine arguments let a model run as a native program, as far as that is known without the model.

For: what packs models, keeps packed ones, and runs them. Does not know: models.
"""

from __future__ import annotations

from ..config import EngineConfig
from .kv_memory import BLOCK_MULTIPLE


def why_modules(config: EngineConfig) -> str:
    """Why the engine arguments rule out a native program; "" when they do not."""
    reasons = {
        "it is the mock": config.model == "mock",
        f"device is '{config.device}'": config.device != "cpu",
        f"the model is split over {config.num_ranks} ranks": config.num_ranks != 1,
        "LoRA adapters are enabled": config.enable_lora,
        "kernels is 'torch'": config.kernels == "torch",
        "enforce_eager is set": config.enforce_eager,
        f"block_size is {config.block_size}, not a multiple of {BLOCK_MULTIPLE}": config.block_size % BLOCK_MULTIPLE
        != 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
