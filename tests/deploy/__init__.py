"""What stands in deploy/: the Grafana board, the alerts."""
