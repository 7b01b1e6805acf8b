"""The OpenAI API for models that implement the LLM tensor interface. Entry point: router.py."""
