"""`llmbackend top`: what a running server computes, live. Begin with command.py."""
