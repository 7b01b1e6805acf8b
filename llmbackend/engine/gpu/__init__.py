"""The accelerator path: one decoder program on device tensors, its kernels, the rows and the sampler on the device."""
