"""`make schemas`: thousands of JSON schemas, each with texts that must be impossible. Start with verdict.py."""
