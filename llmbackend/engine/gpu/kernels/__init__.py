"""Kernels in Triton's language. Imported by the accelerator path alone: nothing that runs on a CPU may need triton."""
