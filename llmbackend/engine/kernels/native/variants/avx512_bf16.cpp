// One library per instruction set; the flags are in pyproject.toml.
//
// This one multiplies bfloat16 by the CPU's dot products of pairs (vdpbf16ps). They run at twice the rate of float32
// fma's on some processors and at half of it on others, so CPUs with the instruction do not necessarily use it.
#define LLMB_BF16_DOTS 1
#include "../library.cpp"
