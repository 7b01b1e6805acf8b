"""Engines that several hosts share, over the network."""
