"""The stub's package under its name in the model's process: objects pickled there can be read in its workers."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent)]
