"""Access control (docs/security.md): API keys, roles, rate limits, restricted APIs and TLS."""
