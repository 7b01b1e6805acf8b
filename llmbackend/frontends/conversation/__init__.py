"""Conversations as models get them: turns, tools, and which tools may be called; the same for every API."""
