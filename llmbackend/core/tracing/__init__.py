"""Tracing of single requests, as Triton's trace extension has it: in a JSON file, or as OpenTelemetry spans.

`settings.py` says what can be set, `trace.py` is what one request collects on its way, `manager.py` decides which
requests are traced, `trace_file.py` and `open_telemetry.py` are where traces end.
"""
