// Selects old versions of glibc's functions, so that libraries built here run on older systems.
//
// Used by library.cpp. Invariant: the function computes the same bits; the newer version of `log` (glibc 2.29) differs
// only in not supporting pre-POSIX error handlers.
#pragma once

#include <cmath>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#endif
