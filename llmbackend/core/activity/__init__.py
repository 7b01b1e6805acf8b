"""Live activity of models for viewers of the server. Begin with messages.py."""
