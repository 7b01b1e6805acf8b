"""`llmbackend top`: live view of what a running server computes. Start with command.py."""
