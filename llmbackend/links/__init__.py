"""What links between processes share: the cluster's key, ZeroMQ sockets, and what happens to their connections."""
