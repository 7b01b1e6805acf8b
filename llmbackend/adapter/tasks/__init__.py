"""The generations of a model: queued, placed on engines, and put back when one dies."""
