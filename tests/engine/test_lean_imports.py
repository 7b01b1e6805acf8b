"""Leaving the compiler out of the imports leaves nothing behind: four cases in a process of their own, one by one.

In this order each case finds what the one before should have left as it was; the compiler itself is imported last.
"""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

CASES = {
    "an error inside restores everything": """
        import torch, torch.compiler, torch.distributed
        before = torch.compiler.disable, torch.distributed.is_available
        try:
            with lean_imports.without_compiler():
                raise KeyError
        except KeyError:
            pass
        assert (torch.compiler.disable, torch.distributed.is_available) == before
        assert "torch._dynamo" not in sys.modules and "_dynamo" not in vars(torch)
    """,
    "what torch kept on a function is forgotten": """
        plain = lambda x: x
        kept = torch._disable_dynamo(plain)
        with lean_imports.without_compiler():
            assert kept(3) == 3 and "__dynamo_disable" in vars(plain)
        assert "__dynamo_disable" not in vars(plain)
    """,
    "the real compiler is imported afterwards": """
        with lean_imports.without_compiler():
            import torch._dynamo as stand_in
        import torch._dynamo
        assert torch._dynamo is not stand_in and torch._dynamo.__file__
    """,
    "a compiler that is there stays": """
        import torch._dynamo as real
        with lean_imports.without_compiler():
            import torch._dynamo
            assert torch._dynamo is real
        assert sys.modules["torch._dynamo"] is real
    """,
}


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    lines = ["import sys", "from llmbackend.engine.model import lean_imports"]
    for case, source in CASES.items():
        lines += [f"print({case!r}, flush=True)", dedent(source)]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    assert result.stdout.splitlines() == list(CASES)
