"""What a model without memory needs beside the tensors of its files: buffers that its config alone decides.

For: whatever builds a model on torch's meta device and gives it tensors itself. Does not know: files, weights.
Invariant: what it gives is what transformers computes when it builds the model in memory.
"""

from __future__ import annotations

from typing import Any

import torch


def restore_buffers(model: Any) -> None:
    """Gives a model without memory what its files do not hold: rotary frequencies, and the embedding's factor."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if "rotary" in name and hasattr(child, "config"):
                setattr(module, name, type(child)(config=child.config))
    embedding = model.get_input_embeddings()
    for name, buffer in list(embedding.named_buffers(recurse=False)):
        setattr(embedding, name, torch.full(buffer.shape, float(embedding.weight.shape[1]) ** 0.5, dtype=buffer.dtype))
