"""Tracing of individual requests (Triton's trace extension), to a JSON file or as OpenTelemetry spans."""
