"""Servers and engines inside other programs: the contents of `import llmbackend` (docs/embedding.md)."""
