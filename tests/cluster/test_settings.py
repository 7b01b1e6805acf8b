"""What `--cluster` takes, and that nothing of a cluster is there without it."""

import subprocess
import sys

import pytest

from llmbackend.cluster.settings import ClusterSettings


@pytest.mark.parametrize("address", ["", "10.0.0.1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", ":6379", "Auto"])
def test_an_address_is_auto_or_host_and_port(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected 'auto' or HOST:PORT"):
        ClusterSettings(address=address, bind="10.0.0.2")


def test_who_joins_can_be_reached() -> None:
    with pytest.raises(ValueError, match=r"this machine's address is 127\.0\.0\.1, expected the one at which"):
        ClusterSettings(address="10.0.0.1:6379")
    assert ClusterSettings(address="auto").bind == "127.0.0.1"
    assert ClusterSettings(address="10.0.0.1:6379", bind="10.0.0.2").address == "10.0.0.1:6379"


def test_ray_is_imported_only_where_it_is_needed() -> None:
    """Neither the command line, nor the launcher, nor a host imports Ray or makes certificates."""
    program = (
        "import sys, llmbackend.cli.serve, llmbackend.cluster.launcher, llmbackend.cluster.host_process, "
        "llmbackend.server.serve; print([name for name in ('ray', 'cryptography') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
