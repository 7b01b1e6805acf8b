"""A model without weights and its sampler: everything of an engine but the arithmetic, for tests and demonstrations."""
