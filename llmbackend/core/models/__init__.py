"""One version of a model that serves: the shells around the backend's model and its instances."""
