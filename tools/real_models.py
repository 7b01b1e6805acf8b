"""Real checkpoints, converted from known models (`llmbackend models`), for tests and measurements that need trained
weights.

    python -m tools.real_models FOLDER      of each known model NAME: FOLDER/NAME, in bfloat16 (smollm2 270 MB,
                                            gemma3-270m 540 MB), and FOLDER/NAME.gguf, from which it is converted

Part of `make real-models` and `make bench`. Independent of how they are used. Needs the package `gguf`. Invariant: an
existing checkpoint is complete, because it is first written under another name.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from llmbackend.server.known_models import KNOWN_MODELS, FetchError
from llmbackend.server.package_files import file_of

NAMES = tuple(model.name for model in KNOWN_MODELS)


def make(name: str, folder: Path) -> Path:
    """The checkpoint's directory below `folder`, made if it is missing. Raises FetchError if its file cannot be
    fetched."""
    [model] = (model for model in KNOWN_MODELS if model.name == name)
    target, file = folder / name, folder / f"{name}.gguf"
    if not target.is_dir() or not file.is_file():
        part = folder / f"part-{name}"
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copyfile(file_of(model), file)
        _dequantise(file, part)
        part.rename(target)
    return target


def _dequantise(gguf: Path, target: Path) -> None:
    """The numbers of the file, rounded to bfloat16, as a checkpoint of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del model.config.quantization_config  # describes the GGUF file; with it transformers refuses to save the model
    plain = type(model)(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in NAMES:
            print(make(name, folder))
    except FetchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
