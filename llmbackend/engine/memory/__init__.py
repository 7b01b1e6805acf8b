"""KV blocks: block tables, prefix cache, host tier."""
