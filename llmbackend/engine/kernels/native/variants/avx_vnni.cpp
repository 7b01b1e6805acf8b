// One library per instruction set: the flags stand in pyproject.toml.
#include "../library.cpp"
