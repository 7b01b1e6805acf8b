"""Agents' requests under faults: schemas, tools, reasoning, several choices, prompt logprobs, adapters."""
