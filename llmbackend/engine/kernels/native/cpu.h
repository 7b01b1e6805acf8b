// Which instruction sets this CPU and its operating system support.
//
// library.py asks the generic library, then loads the best one. Invariant: reports only what may be executed: AMX
// counts once Linux has granted its tile registers to this process.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmb {

enum Feature : int32_t { kAvx2 = 1, kAvx512 = 2, kAvx512Vnni = 4, kAmx = 8, kAvx512Bf16 = 16, kAvxVnni = 32 };

inline bool amx_granted() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl's ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#if defined(__x86_64__)
// Not every compiler that supports it knows its name.
inline bool has_avx_vnni() {
    constexpr unsigned kLeaf = 7, kSubleaf = 1, kBit = 4;  // of eax
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(kLeaf, kSubleaf, &eax, &ebx, &ecx, &edx) != 0 && (eax >> kBit & 1) != 0;
}
#endif

inline int32_t cpu_features() {
    int32_t features = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) features |= kAvx2;
    if ((features & kAvx2) && has_avx_vnni()) features |= kAvxVnni;
    if ((features & kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        features |= kAvx512;
    if ((features & kAvx512) && __builtin_cpu_supports("avx512vnni")) features |= kAvx512Vnni;
#if defined(__GNUC__) && !defined(__clang__)
    if ((features & kAvx512Vnni) && __builtin_cpu_supports("avx512bf16")) features |= kAvx512Bf16;
    if ((features & kAvx512Bf16) && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
        __builtin_cpu_supports("amx-int8") && amx_granted())
        features |= kAmx;
#endif
#endif
    return features;
}

}  // namespace llmb
