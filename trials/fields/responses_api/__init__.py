"""The fields of /v1/responses, its items and tools, and the endpoints of stored responses."""
