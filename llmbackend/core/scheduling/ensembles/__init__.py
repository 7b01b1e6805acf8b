"""The scheduler of ensembles: a request's tensors flow from model to model."""
