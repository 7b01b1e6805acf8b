"""The bundled demo model: where it lies, in a checkout and in an installed package alike.

For: `llmbackend serve --demo`, and programs that embed a server or an engine. Does not know: what the model can do.
Invariant: there is one copy of its files; in a checkout demo_repository is a link to model_repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO_REPOSITORY: Final = Path(__file__).parent / "demo_repository"
"""A Triton repository with the model `demo`."""
DEMO_MODEL: Final = DEMO_REPOSITORY / "demo" / "1"
"""Its checkpoint."""
