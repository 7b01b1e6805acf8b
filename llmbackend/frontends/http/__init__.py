"""HTTP, the same for every API: connections, bodies, JSON, errors, responses."""
