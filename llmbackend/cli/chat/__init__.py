"""`llmbackend chat`: a conversation with a model of any OpenAI-compatible server. Begin with command.py."""
