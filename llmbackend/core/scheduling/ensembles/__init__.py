"""The scheduler of ensembles, which passes a request's tensors from model to model."""
