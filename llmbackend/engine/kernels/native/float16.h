// IEEE float16, in which the scales of 4-bit weights are stored.
//
// Used by linear_int4.h. Invariant: conversion to float32 is exact, even of subnormal numbers on threads that flush
// those to zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace llmb {

// p: kLanes of them.
inline Floats load_float16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    Ints bits;
    for (int i = 0; i < kLanes; i++) bits[i] = p[i];
    const Ints sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    const Ints normal = (magnitude << 13) + (112 << 23);
    const Floats small = __builtin_convertvector(magnitude, Floats) * 5.9604645e-8f;  // 2^-24
    return (Floats)((magnitude < 0x400 ? (Ints)small : normal) | sign);
#endif
}

inline float to_float(uint16_t float16) {
    const int magnitude = float16 & 0x7fff;
    const float value = magnitude < 0x400 ? static_cast<float>(magnitude) * 5.9604645e-8f
                                          : std::ldexp(static_cast<float>((magnitude & 0x3ff) | 0x400), (magnitude >> 10) - 25);
    return float16 & 0x8000 ? -value : value;
}

// Rounds a finite number to nearest, ties to even; saturates at the largest one.
inline uint16_t to_float16(float x) {
    const float magnitude = std::fabs(x);
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (magnitude >= 65504.0f) return sign | 0x7bff;
    int exponent = -13;  // of subnormal numbers
    if (magnitude >= 6.1035156e-5f) std::frexp(magnitude, &exponent);
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));  // of 2^(exponent - 11)
    return sign | static_cast<uint16_t>(steps + (exponent + 13) * 1024);  // a carry increments the exponent
}

}  // namespace llmb
