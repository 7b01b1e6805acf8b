"""The `llmbackend` command: subcommands and flags, one module per feature."""
