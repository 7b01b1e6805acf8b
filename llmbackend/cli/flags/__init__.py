"""The flags of `llmbackend serve`, in groups."""
