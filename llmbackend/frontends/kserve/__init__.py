"""KServe v2 over HTTP with Triton's extensions, among them generate and generate_stream."""
