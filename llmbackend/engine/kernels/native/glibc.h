// Which versions of glibc's functions a library asks for: old ones, so that what is built here runs on older systems.
//
// For: library.cpp. Does not know: kernels. Invariant: the function computes the same bits; the newer version of `log`
// (glibc 2.29) differs only in that it does not support error handlers of programs from before POSIX.
#pragma once

#include <cmath>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#endif
