"""What a step on a device knows of its rows."""
