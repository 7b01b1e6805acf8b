"""The chat page. Begin with page.py."""
