// The types and functions of CUDA C++ that the kernels use and that are the same however threads run on the host.
#pragma once
#define CARASERVE_ON_HOST
#include <time.h>

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline int max(int a, int b) { return a < b ? b : a; }
static inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float fabsf(float v) { return __builtin_fabsf(v); }
static inline float logf(float v) { return __builtin_logf(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
static inline unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
#define fmaf __builtin_fmaf

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define __launch_bounds__(...)

// --- stand-ins for the PTX of common.cuh ---

static inline uint4 load_weights(const void* at) { return *(const uint4*)at; }
static inline uint4 load_from_host(const void* at) { return *(const uint4*)at; }
static inline unsigned long long now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
static inline float from_half(unsigned short bits) { return (float)__builtin_bit_cast(_Float16, bits); }
static inline unsigned short to_half(float v) { return __builtin_bit_cast(unsigned short, (_Float16)v); }
static inline float exp2_approximately(float v) { return __builtin_exp2f(v); }
static inline unsigned short to_bfloat(float v) {
    const unsigned bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
