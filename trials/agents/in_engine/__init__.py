"""Imported automatically in the engine's process, because this folder is on its PYTHONPATH."""
