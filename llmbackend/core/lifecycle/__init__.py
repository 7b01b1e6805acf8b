"""Loads and unloads models, and tracks versions and their states."""
