"""The adapter inside NVIDIA's own server: the backend contract on top of pb_utils, and its installation."""
