"""KServe v2 over gRPC: unary RPCs, ModelStreamInfer, and the standard health service."""
