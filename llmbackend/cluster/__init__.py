"""Several machines as one server. Ray places engines, restarts them, and knows the hosts. Start with launcher.py.

Ray is imported only by the node's own processes, the agent and Ray's workers. It is never on a token's path.
"""
