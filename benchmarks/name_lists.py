"""Lists of known names as values of flags, for the command lines of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_of(known: Collection[str], separator: str = ",") -> Callable[[str], tuple[str, ...]]:
    """argparse's type of a flag whose value is some of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(separator))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {f'{separator} '.join(known)}")
        return names

    return parse
