"""Engines for tests and demonstrations: a model without weights (`--model mock`), and fault injection."""
