"""How well requests find the engines that have their prefixes, and what that costs."""
