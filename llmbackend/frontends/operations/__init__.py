"""What operators use, over any protocol: metrics, probes, log and trace settings."""
