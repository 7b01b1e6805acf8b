"""One serving version of a model: the host's objects around the backend's model and its instances."""
