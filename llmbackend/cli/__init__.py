"""The llmbackend command: its subcommands and flags, one module for each feature."""
