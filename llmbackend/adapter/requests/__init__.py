"""From a Triton request to its tasks, and from their outputs to its responses."""
