"""Native CPU kernels: C++ in native/, compiled once per instruction set and called through ctypes; without a compiler
at installation everything else still works."""
