"""The host, the counterpart of Triton's core. Independent of LLMs and wire protocols."""
