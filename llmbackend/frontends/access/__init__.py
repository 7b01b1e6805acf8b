"""Access to a server: API keys, roles, rate limits, restricted APIs and TLS (docs/security.md).

For: the server process. Does not know: models. Begin with `access_control.AccessControl` and `settings.AccessSettings`.
"""
