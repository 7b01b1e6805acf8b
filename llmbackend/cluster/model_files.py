"""Whether a machine can read a model's files, asked where its engine is to run.

For: engines' actors. Does not know: what is in them. Invariant: the problem names the path.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmbackend.engine.config import EngineConfig


def unreadable(config: EngineConfig) -> str:
    """Why this machine cannot read the files that the configuration names by their full path; "" = it can. Others are
    of the hub, or of no file."""
    folders = {"model": config.model, **{f"LoRA adapter '{name}'": path for name, path in config.lora_modules.items()}}
    for what, path in folders.items():
        if not os.path.isabs(path):
            continue
        try:
            if Path(path).is_dir():
                os.scandir(path).close()
            else:
                Path(path).open("rb").close()
        except OSError as error:
            return (
                f"the {what} '{path}' cannot be read: {error.strerror}. Expected the same files at the same path on "
                "each machine of the cluster, such as a shared file system"
            )
    return ""
