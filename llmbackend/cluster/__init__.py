"""Several machines as one server: Ray places engines and restarts them, and knows the hosts. Begin with launcher.py.

Only the node's own processes, the agent and Ray's workers import Ray. It is never in a token's path.
"""
