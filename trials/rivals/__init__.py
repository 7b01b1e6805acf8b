"""Compares fault tolerance: the same faults under live streams of any server with OpenAI's API."""
