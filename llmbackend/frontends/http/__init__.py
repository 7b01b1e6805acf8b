"""HTTP for all APIs: connections, bodies, JSON, errors, responses."""
