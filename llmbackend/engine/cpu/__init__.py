"""The CPU path: a decoder program on native kernels, and linear layers for models that run as modules."""
