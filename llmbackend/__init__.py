"""llmbackend: serve large language models the Triton way, in Python."""

__version__ = "0.1.0"
