"""`llmbackend check`: would a model load, and what would it take? Begin with command.py."""
