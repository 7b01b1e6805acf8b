"""The fields of /v1/messages and /v1/messages/count_tokens, and their blocks and tools."""
