"""Sample texts of all formats: a module for each family, with a tuple SAMPLES."""

from __future__ import annotations

import importlib
import pkgutil

from ..sample import Sample

SAMPLES: tuple[Sample, ...] = tuple(
    sample
    for module in pkgutil.iter_modules(__path__)
    for sample in importlib.import_module(f"{__name__}.{module.name}").SAMPLES
)
