"""The OpenAI API in front of models that speak the LLM tensor interface."""

from .router import create_openai_router

__all__ = ["create_openai_router"]
