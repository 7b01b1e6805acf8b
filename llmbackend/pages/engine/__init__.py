"""The Engine page: live view of each engine's work on each request. Begin with page.py, then view/live_view.js."""
