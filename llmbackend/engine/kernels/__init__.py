"""Native CPU kernels: C++ in native/, compiled once per instruction set and called through ctypes. If no compiler was
available at installation, everything still works without them."""
