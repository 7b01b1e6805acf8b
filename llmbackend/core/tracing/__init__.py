"""Tracing of single requests (Triton's trace extension), to a JSON file or as OpenTelemetry spans."""
