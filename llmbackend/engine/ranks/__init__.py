"""Ranks of an engine on several machines, each in a process that others start."""
