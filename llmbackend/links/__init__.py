"""Links between processes: the cluster's key, ZeroMQ sockets and their connection events, loopback addresses."""
