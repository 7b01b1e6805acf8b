"""Model configurations and their rules."""
