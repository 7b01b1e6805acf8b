"""Anthropic's Messages API. Entry point: router.py."""
