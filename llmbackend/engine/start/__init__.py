"""What an engine's process does until its model is loaded."""
