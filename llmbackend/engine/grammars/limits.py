"""What a compiled grammar may cost: the limits of the library, for the engine and for who checks grammars before it.

For: grammar_compiler.py, and the adapter, which refuses with a path what the engine could not follow. Does not know:
grammars. Invariant: both sides' limits are made from one object; the adapter's are none larger.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Each of one grammar, or of one mask of it."""

    initial_lexer_fuel: int = 1_000_000
    """Some 20 ms for the regular expressions of a grammar."""
    step_lexer_fuel: int = 100_000
    """Some 7 ms for those of one mask."""
    step_max_items: int = 50_000
    """Some 3 ms of one mask."""
    max_items_in_row: int = 2_000
    """Ways in which the grammar may go on from one place."""
    max_lexer_states: int = 50_000
    """Up to 100 MB."""
    max_grammar_size: int = 500_000
    """Symbols."""

    def for_library(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(verbose_errors=False, **dataclasses.asdict(self))


ENGINE_LIMITS: Final = GrammarLimits()
