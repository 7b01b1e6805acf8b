"""For operators: metrics, probes, engine events, log and trace settings."""
