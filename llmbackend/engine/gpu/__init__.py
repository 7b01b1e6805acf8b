"""The accelerator path: a decoder program on device tensors, its kernels, and the rows and the sampler on the
device."""
