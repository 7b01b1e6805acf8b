"""What agents ask: schemas, tools, reasoning, several choices, prompt logprobs, adapters; all of it under faults."""
