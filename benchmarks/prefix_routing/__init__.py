"""How well requests find the engines that have their beginnings, and what that costs."""
