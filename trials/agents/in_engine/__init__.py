"""What the engine's process imports by itself: this folder is on its PYTHONPATH."""
