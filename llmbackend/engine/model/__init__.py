"""From a checkpoint to a module that computes flattened batches."""
