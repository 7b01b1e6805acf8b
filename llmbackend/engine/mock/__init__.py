"""A model without weights: everything of an engine but the arithmetic, for tests and demonstrations."""
