"""Servers and engines inside other programs: what `import llmbackend` offers (docs/embedding.md)."""
