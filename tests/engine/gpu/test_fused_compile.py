"""The fused kernels and those of sampling compile for a Hopper GPU and keep what they hold in registers."""

from __future__ import annotations
