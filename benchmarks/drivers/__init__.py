"""One file per engine: loads it and runs a workload. Each runs in its engine's own environment."""
