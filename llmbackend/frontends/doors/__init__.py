"""Who may enter a server, how often, and over which wires: keys, rate limits, restricted APIs, TLS (docs/security.md).

For: the life of the server process (`doors.Doors`) and its settings (`settings.DoorSettings`). Does not know: models.
"""
