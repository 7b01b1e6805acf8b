"""Live activity of models, for viewers of the server. Start with messages.py."""
