"""The chat page. Entry point: page.py."""
