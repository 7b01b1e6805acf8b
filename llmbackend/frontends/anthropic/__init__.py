"""Anthropic's Messages API in front of models that speak the LLM tensor interface."""

from .router import create_anthropic_router

__all__ = ["create_anthropic_router"]
