"""The sequence batcher: the requests of a sequence go to one instance, in order, with the sequence's state."""
