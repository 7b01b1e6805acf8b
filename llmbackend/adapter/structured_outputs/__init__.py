"""Turns a client's output constraint (a schema, a choice, tags …) into a grammar. Start with compilation.py."""
