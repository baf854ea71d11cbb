// Runs the CUDA kernels on a CPU, for tests: a block is as many fibers as it has threads, switched at barriers.
//
// It implements only what these kernels use. A grid's blocks run one after another, the threads of a block in an order
// that the seed chooses, which exposes missing barriers and blocks that rely on their number. Unaligned vector loads
// trap (the compiler's alignment sanitizer), and barriers that can never be passed are reported.
#pragma once
#include "cuda_types.h"
#include <sched.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define KERNEL extern "C" void
#define __shared__ static thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))

namespace host {
constexpr unsigned MOST_THREADS = 1024, WARP = 32;
constexpr size_t STACK = 1 << 17;

struct Index { unsigned x; };
struct Fiber {
    jmp_buf at;
    ucontext_t beginning;
    bool begun, ended;
    unsigned exchanges;
};
struct Meeting { unsigned arrived, members, generation; };
struct Warp {
    Meeting meeting;
    unsigned slots[2][WARP];
};
struct Block {
    Fiber fibers[MOST_THREADS];
    Warp warps[MOST_THREADS / WARP];
    Meeting meeting;
    jmp_buf scheduler;
    ucontext_t any;
    char* stacks;
    void (*body)(void*);
    void* argument;
    unsigned order[MOST_THREADS], place; // in which the threads run, and the place of the running one
    unsigned threads, running, moves, index, grid;
    unsigned long long random;
};
static thread_local Block block;
static char* spare_stacks; // of an earlier launch: the first write to each page of new ones costs as much as a launch

static void rest() { // until all other threads have run
    if (_setjmp(block.fibers[block.running].at)) return;
    if (block.place + 1 < block.threads) { // straight to the next one, which costs half as much as by the scheduler
        Fiber& next = block.fibers[block.order[block.place + 1]];
        if (next.begun && !next.ended) {
            block.running = block.order[++block.place];
            _longjmp(next.at, 1);
        }
    }
    _longjmp(block.scheduler, 1);
}

static void pass_if_complete(Meeting& meeting) {
    if (meeting.members == 0 || meeting.arrived < meeting.members) return;
    meeting.arrived = 0;
    meeting.generation++;
}

static void meet(Meeting& meeting) {
    const unsigned generation = meeting.generation;
    block.moves++;
    meeting.arrived++;
    pass_if_complete(meeting);
    while (meeting.generation == generation) rest();
}

static void begin() {
    block.body(block.argument);
    block.moves++;
    block.fibers[block.running].ended = true;
    Meeting* const meetings[] = {&block.meeting, &block.warps[block.running / WARP].meeting};
    for (Meeting* meeting : meetings) {
        meeting->members--;
        pass_if_complete(*meeting);
    }
    _longjmp(block.scheduler, 1);
}

static void resume(unsigned thread) {
    block.running = thread;
    if (_setjmp(block.scheduler)) return;
    Fiber& fiber = block.fibers[thread];
    if (fiber.begun) _longjmp(fiber.at, 1);
    fiber.begun = true;
    setcontext(&fiber.beginning);
}

static unsigned draw(unsigned below) {
    block.random = block.random * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(block.random >> 33) % below;
}

static void shuffle(unsigned* order, unsigned count, unsigned seed) {
    for (unsigned i = 0; i < count; i++) order[i] = i;
    for (unsigned i = count; seed && i > 1; i--) {
        const unsigned j = draw(i), kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
}

static int run_block(unsigned seed) {
    static thread_local unsigned left, moves;
    block.meeting = {0, block.threads, 0};
    getcontext(&block.any); // a system call, which every fiber need not make
    for (unsigned i = 0; i < block.threads; i++) {
        Fiber& fiber = block.fibers[i];
        fiber.begun = fiber.ended = false;
        fiber.beginning = block.any;
        fiber.beginning.uc_stack.ss_sp = block.stacks + i * STACK;
        fiber.beginning.uc_stack.ss_size = STACK;
        makecontext(&fiber.beginning, begin, 0);
        const unsigned beyond = block.threads - i / WARP * WARP;
        block.warps[i / WARP].meeting = {0, beyond < WARP ? beyond : WARP, 0};
    }
    shuffle(block.order, block.threads, seed);
    for (left = block.threads; left > 0;) {
        moves = block.moves;
        for (block.place = 0; block.place < block.threads; block.place++) {
            if (block.fibers[block.order[block.place]].ended) continue;
            resume(block.order[block.place]);
            left -= block.fibers[block.order[block.place]].ended; // the one that ran last
        }
        if (block.moves == moves) return 1; // deadlock
    }
    return 0;
}

template <class T, T... I> struct Places {};

template <class... A> struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <int... I> void at(Places<int, I...>) { kernel(*(A*)arguments[I]...); }
    static void make(void* self) { ((Call*)self)->at(__make_integer_seq<Places, int, sizeof...(A)>()); }
};

template <class... A>
static int launch(void (*kernel)(A...), unsigned grid, unsigned threads, unsigned seed, void** arguments) {
    Call<A...> call = {kernel, arguments};
    unsigned* blocks = (unsigned*)malloc(grid * sizeof(unsigned));
    block.stacks = __atomic_exchange_n(&spare_stacks, nullptr, __ATOMIC_ACQ_REL);
    if (block.stacks == nullptr) {
        block.stacks = (char*)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    block.body = Call<A...>::make;
    block.argument = &call;
    block.threads = threads;
    block.grid = grid;
    block.random = seed;
    shuffle(blocks, grid, seed);
    int status = 0;
    for (unsigned i = 0; i < grid && status == 0; i++) {
        block.index = blocks[i];
        status = run_block(seed);
    }
    char* const other = __atomic_exchange_n(&spare_stacks, block.stacks, __ATOMIC_ACQ_REL);
    if (other != nullptr) munmap(other, MOST_THREADS * STACK);
    free(blocks);
    return status;
}

static Warp& warp() { return block.warps[block.running / WARP]; }

// Every thread of a warp publishes a word and may then read all 32 until the next but one exchange.
static const unsigned* exchange(unsigned shown) {
    Fiber& fiber = block.fibers[block.running];
    unsigned* slots = warp().slots[fiber.exchanges++ % 2];
    slots[block.running % WARP] = shown;
    meet(warp().meeting);
    return slots;
}
} // namespace host

#define threadIdx (host::Index{host::block.running})
#define blockIdx (host::Index{host::block.index})
#define blockDim (host::Index{host::block.threads})
#define gridDim (host::Index{host::block.grid})
#define EMULATE(kernel)                                                                                       \
    extern "C" int emulate_##kernel(unsigned grid, unsigned threads, unsigned seed, void** arguments) {       \
        return host::launch(kernel, grid, threads, seed, arguments);                                          \
    }

static inline void __syncthreads() { host::meet(host::block.meeting); }
static inline float __shfl_xor_sync(unsigned, float v, int mask) {
    const unsigned from = (host::block.running ^ mask) % host::WARP;
    return __uint_as_float(host::exchange(__float_as_uint(v))[from]);
}
static inline unsigned __shfl_sync(unsigned, unsigned v, int lane) { return host::exchange(v)[lane]; }
static inline unsigned __shfl_xor_sync(unsigned, unsigned v, int mask) {
    const unsigned from = (host::block.running ^ mask) % host::WARP;
    return host::exchange(v)[from];
}
static inline unsigned __shfl_up_sync(unsigned, unsigned v, unsigned distance) {
    const unsigned lane = host::block.running % host::WARP;
    return host::exchange(v)[lane < distance ? lane : lane - distance];
}
static inline unsigned __ballot_sync(unsigned, bool v) {
    const unsigned* all = host::exchange(v);
    unsigned set = 0;
    for (unsigned i = 0; i < host::WARP; i++) set |= (all[i] & 1) << i;
    return set;
}
static inline bool __any_sync(unsigned, bool v) {
    const unsigned* all = host::exchange(v);
    unsigned any = 0;
    for (unsigned i = 0; i < host::WARP; i++) any |= all[i];
    return any;
}
static inline bool __all_sync(unsigned mask, bool v) { return !__any_sync(mask, !v); }
static inline void __syncwarp() { host::meet(host::warp().meeting); }

// Only one thread runs at a time.
template <class T> static inline T atomicAdd(T* at, T v) {
    const T before = *at;
    *at += v;
    return before;
}
static inline void atomicOr(int* at, int v) { *at |= v; }
static inline void atomicMax(unsigned* at, unsigned v) { *at = max(*at, v); }

// --- stand-ins for the PTX of common.cuh ---

static inline long long load_acquire(const long long* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static inline unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static inline void store_release(long long* at, long long v) { __atomic_store_n(at, v, __ATOMIC_RELEASE); }
static inline void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline unsigned count_in(unsigned* at) { return __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL); }
// What the kernel before this one has yet to write; it is written when this one waits for that.
static thread_local struct { void* to; const void* from; size_t bytes; } unwritten;
extern "C" void emulate_unwritten(void* to, const void* from, size_t bytes) { unwritten = {to, from, bytes}; }
static inline void admit_next_kernel() {}
static inline void await_previous_kernel() {
    if (unwritten.bytes) memcpy(unwritten.to, unwritten.from, unwritten.bytes);
    unwritten.bytes = 0;
}
static inline void nap() {
    host::block.moves++;
    if (host::block.running == 0) sched_yield();
}
