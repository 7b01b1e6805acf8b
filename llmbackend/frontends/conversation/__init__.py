"""Conversations as models receive them: turns, tools, and which tools may be called. Shared by all APIs."""
