"""The generations of a model: queued, placed on engines, and requeued when an engine dies."""
