"""The CPU path: one decoder program on native kernels, and linear layers for models that run as modules."""
