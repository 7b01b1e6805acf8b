"""An engine's process: its lifetime, the host's link to it, and its restart after a failure."""
