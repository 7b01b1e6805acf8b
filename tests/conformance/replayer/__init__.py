"""Replays recorded transcripts of a real Triton server and compares the answers."""
