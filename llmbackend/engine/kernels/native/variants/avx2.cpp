// One library per instruction set; the flags are in pyproject.toml.
#include "../library.cpp"
