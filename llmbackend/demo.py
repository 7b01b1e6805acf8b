"""The path of the bundled demo model, in a checkout (where demo_repository is a link to model_repository) and in an
installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO_REPOSITORY: Final = Path(__file__).parent / "demo_repository"
"""A Triton repository with the model `demo`."""
DEMO_MODEL: Final = DEMO_REPOSITORY / "demo" / "1"
"""Its checkpoint."""
