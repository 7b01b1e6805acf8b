"""Servers and engines inside other programs: the public API of `import llmbackend` (docs/embedding.md)."""
