"""Runs the examples of docs/embedding.md, for a test and for `make wheel-check`.

Used by tests/embedding/test_examples.py and tools/wheel_check.py. Invariant: each example is a complete program.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "embedding.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
