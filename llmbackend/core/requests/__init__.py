"""The path of one request through the host: validation, responses, completion."""
