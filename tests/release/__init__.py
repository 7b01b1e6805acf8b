"""The tools of `make release-check`."""
