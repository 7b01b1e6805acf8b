"""The Engine page: a live view of what each engine does for each request. Entry points: page.py, view/live_view.js."""
