"""From what should be loaded to what serves: loads, unloads, versions and their states."""
