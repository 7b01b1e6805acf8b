"""Anthropic's Messages API in front of models that speak the LLM tensor interface. Begin with router.py."""
