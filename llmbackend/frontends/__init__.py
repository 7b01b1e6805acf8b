"""Protocols: requests of HTTP and gRPC clients become requests to the host, and its responses become theirs.

Does not know: any backend. Begin with http_app.py (HTTP), grpc/server.py (gRPC) and inference_gate.py, through which
every inference reaches the host.
"""
