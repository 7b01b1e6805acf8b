"""The accelerator path: one decoder program on device tensors, its kernels, and what keeps the device busy."""
