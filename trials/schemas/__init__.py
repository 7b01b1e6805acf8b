"""`make schemas`: JSON schemas by the thousand, each with texts that must be impossible. Begin with verdict.py."""
