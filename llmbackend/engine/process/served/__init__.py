"""Engines shared by several hosts over the network."""
