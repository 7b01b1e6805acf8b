"""What models do, step by step, for those who watch the server. Begin with messages.py."""
