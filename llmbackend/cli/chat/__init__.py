"""`llmbackend chat`: a conversation with a model on any OpenAI-compatible server. Start with command.py."""
