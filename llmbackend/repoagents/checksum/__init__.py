"""The `checksum` repository agent (repoagent.py)."""
