"""The sequence batcher: the requests of a sequence reach one instance, in order, each with its state."""
