"""Native CPU kernels: C++ in native/, compiled once per instruction set, called through ctypes.

For: the engine on CPU. `library` finds and loads the library for this CPU, `abi` mirrors its structures. Does not know:
models or steps beyond their flat arrays. Invariant: without a compiler at installation everything else still works.
"""
