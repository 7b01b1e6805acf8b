"""Kernels in Triton's language. Only the accelerator path imports them: nothing that runs on a CPU may need triton."""
