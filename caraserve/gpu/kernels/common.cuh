// Shared by all kernels: conversions of storage types, and memory operations that C++ cannot express.
//
// NVRTC compiles these files without any system header. All PTX is in this file, excluded under
// CARASERVE_ON_HOST, where tests define functions of the same names: the kernels themselves are plain C++.
// ACTIVATION, WEIGHT codes are those of model/dtype.py's Dtype: 0 fp32, 1 bf16, 2 fp16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 EVERYONE = 0xffffffffu; // all lanes of a warp
constexpr int PANEL = 64;             // columns

#ifndef CARASERVE_ON_HOST
#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__

// Weights are read once: they must not push activations out of L1. Not `.nc`, although they are constant: the assembler
// would move these loads behind `await_previous_kernel`.
DEVICE uint4 load_weights(const void* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// Bypasses every cache that could hold an older value: addresses in host memory are reused.
DEVICE uint4 load_from_host(const void* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

DEVICE i64 load_acquire(const i64* at) {
    i64 v;
    asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

DEVICE u32 load_acquire(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

DEVICE void store_release(i64* at, i64 v) {
    asm volatile("st.release.sys.global.s64 [%0], %1;" : : "l"(at), "l"(v) : "memory");
}

DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }

// Adds one. Orders everything this block did before everything that the last block to add does afterwards.
DEVICE u32 count_in(u32* at) {
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// Lets the next kernel of the stream begin beside this one, if its launch allows that (`Launch.begins_early`), once every
// block of this one runs.
DEVICE void admit_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before this one has ended and its writes are visible; at once if this one began after that.
DEVICE void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

DEVICE void nap() { asm volatile("nanosleep.u32 100;"); }

DEVICE u64 now_ns() {
    u64 v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}

DEVICE float from_half(u16 bits) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}

DEVICE u16 to_half(float v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

DEVICE u16 to_bfloat(float v) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

DEVICE float exp2_approximately(float v) {
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
#endif

// The value of projection `p`, of up to six (MOST_SITES): registers and parameters cannot be indexed at run time.
DEVICE int choose(int p, int v0, int v1, int v2, int v3, int v4, int v5) {
    return p == 0 ? v0 : p == 1 ? v1 : p == 2 ? v2 : p == 3 ? v3 : p == 4 ? v4 : v5;
}

DEVICE float from_bfloat(u32 bits) { return __uint_as_float(bits << 16); }

// Returns the biases of a projection: they follow its factors, which are padded to panels.
DEVICE const float* biases_after(const float* factors, int outputs) {
    return factors + (outputs + PANEL - 1) / PANEL * PANEL;
}

// Applies the factors and biases of four outputs.
DEVICE void apply_vectors(const float* factors, const float* biases, float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = fmaf(factors[i], v[i], biases[i]);
}

// PER_LOAD: how many numbers of a type come with one 16-byte load.
template <int DTYPE> struct Stored;

template <> struct Stored<0> {
    static constexpr int PER_LOAD = 4;
    typedef float type;
    static DEVICE_MEMBER void unpack(uint4 v, float* to) {
        to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y);
        to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
    }
    static DEVICE_MEMBER float widen(float v) { return v; }
    static DEVICE_MEMBER float narrow(float v) { return v; }
};

template <> struct Stored<1> {
    static constexpr int PER_LOAD = 8;
    typedef u16 type;
    static DEVICE_MEMBER void unpack(uint4 v, float* to) {
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[2 * i] = __uint_as_float(pairs[i] << 16);
            to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
    static DEVICE_MEMBER float widen(u16 v) { return from_bfloat(v); }
    static DEVICE_MEMBER u16 narrow(float v) { return to_bfloat(v); }
};

template <> struct Stored<2> {
    static constexpr int PER_LOAD = 8;
    typedef u16 type;
    static DEVICE_MEMBER void unpack(uint4 v, float* to) {
        const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            to[2 * i] = from_half((u16)(pairs[i] & 0xffff));
            to[2 * i + 1] = from_half((u16)(pairs[i] >> 16));
        }
    }
    static DEVICE_MEMBER float widen(u16 v) { return from_half(v); }
    static DEVICE_MEMBER u16 narrow(float v) { return to_half(v); }
};

#ifdef ACTIVATION
typedef Stored<ACTIVATION> Activation;
typedef Activation::type activation;

// Loads four neighbouring activations, the first on a multiple of four. Rows are readable to a multiple of 16.
DEVICE void load_four(const activation* at, float* to) {
#if ACTIVATION == 0
    Activation::unpack(*(const uint4*)at, to);
#else
    const uint2 v = *(const uint2*)at;
    to[0] = Activation::widen((u16)(v.x & 0xffff)), to[1] = Activation::widen((u16)(v.x >> 16));
    to[2] = Activation::widen((u16)(v.y & 0xffff)), to[3] = Activation::widen((u16)(v.y >> 16));
#endif
}

DEVICE void store_four(activation* at, const float* v) {
#if ACTIVATION == 0
    uint4 wide;
    wide.x = __float_as_uint(v[0]), wide.y = __float_as_uint(v[1]);
    wide.z = __float_as_uint(v[2]), wide.w = __float_as_uint(v[3]);
    *(uint4*)at = wide;
#else
    uint2 packed;
    packed.x = Activation::narrow(v[0]) | (u32)Activation::narrow(v[1]) << 16;
    packed.y = Activation::narrow(v[2]) | (u32)Activation::narrow(v[3]) << 16;
    *(uint2*)at = packed;
#endif
}

// The same for `count` of them, at any place: the others are left alone, and 0 is loaded for them.
DEVICE void load_few(const activation* at, int count, float* to) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = i < count ? Activation::widen(at[i]) : 0.0f;
}

DEVICE void store_few(activation* at, int count, const float* v) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) at[i] = Activation::narrow(v[i]);
}

// Stores as many activations as 16 bytes hold, at a multiple of 16 bytes.
DEVICE void store_vector(activation* at, const float (&v)[Activation::PER_LOAD]) {
#if ACTIVATION == 0
    store_four(at, v);
#else
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        pairs[i] = Activation::narrow(v[2 * i]) | (u32)Activation::narrow(v[2 * i + 1]) << 16;
    *(uint4*)at = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}

// Loads the activations for one load of weights, zeros from `count` on: the memory after a row is not the kernel's and
// may hold NaN.
template <int WIDTH> DEVICE void load_many(const activation* at, int count, float (&to)[WIDTH]) {
#if ACTIVATION != 0
    if (WIDTH == 8)
        Activation::unpack(*(const uint4*)at, to);
    else
#endif
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) load_four(at + i, to + i);
    if (count < WIDTH) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            if (i >= count) to[i] = 0.0f;
    }
}
#endif
