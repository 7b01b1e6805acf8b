"""Paths of the property tests: they use the helpers of the rooms that they exercise."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent))
for room in ("engine", "adapter", "core", "e2e", "properties"):
    sys.path.insert(0, str(TESTS / room))
