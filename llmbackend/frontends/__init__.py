"""Protocols: turns requests of HTTP and gRPC clients into requests to the host, and the host's responses into theirs.

Does not know: any backend. Begin with http_app.py (all of HTTP), grpc/server.py (all of gRPC) and inference_gate.py,
through which every inference reaches the host.

access/      API keys, roles, rate limits, restricted APIs, TLS
grpc/        KServe v2 over gRPC
http/        HTTP itself: connections, bodies, JSON, errors, responses
kserve/      KServe v2 over HTTP, generate and generate_stream
openai/      the OpenAI API
operations/  metrics, probes, log and trace settings, over any protocol
workers/     threads and processes for large bodies
"""
