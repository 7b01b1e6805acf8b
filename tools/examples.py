"""The examples of docs/embedding.md, which a test and `make wheel-check` run.

For: tests/embedding/test_examples.py, tools/wheel_check.py. Invariant: each example is a whole program.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "embedding.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
