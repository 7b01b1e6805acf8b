"""The host: what Triton's core does. Knows no LLM and no wire protocol."""
