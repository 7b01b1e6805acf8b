"""Tracing of single requests (Triton's trace extension), to a JSON file or as OpenTelemetry spans.

settings.py: what can be set; trace.py: what one request collects; spans.py: what backends add to it; manager.py: which
requests are traced; manager.py and open_telemetry.py: where traces go.
"""
