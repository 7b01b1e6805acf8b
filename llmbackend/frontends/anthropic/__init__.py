"""Anthropic's Messages API. Begin with router.py."""
