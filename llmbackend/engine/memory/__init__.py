"""KV blocks: tables, prefix cache, host tier."""
