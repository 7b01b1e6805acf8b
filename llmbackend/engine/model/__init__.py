"""From a checkpoint to modules that compute flattened batches."""
