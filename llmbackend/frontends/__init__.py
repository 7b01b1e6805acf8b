"""Wire protocols: translates HTTP and gRPC requests into host requests, and host responses back.

Independent of backends. Entry points: http_app.py (HTTP), grpc/server.py (gRPC) and inference_gate.py, through which
every inference reaches the host.
"""
