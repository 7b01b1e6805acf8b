"""From what a client asks of its output (a schema, a choice, tags …) to a grammar. Begin with compilation.py."""
