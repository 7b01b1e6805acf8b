"""The Engine page: what each engine does with each request, live. Begin with page.py, then view/live_view.js."""
