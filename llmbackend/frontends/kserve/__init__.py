"""KServe v2 over HTTP with Triton's extensions, including generate and generate_stream."""
