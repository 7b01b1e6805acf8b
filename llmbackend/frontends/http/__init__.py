"""HTTP itself, shared by KServe and OpenAI: connections, bodies, JSON, errors, responses."""
