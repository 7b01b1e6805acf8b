"""One file per engine: how it is loaded and how it is given a workload. Each runs in its engine's own environment."""
