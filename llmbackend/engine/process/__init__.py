"""An engine's process: its life, the host's link to it, and the restart when it dies."""
