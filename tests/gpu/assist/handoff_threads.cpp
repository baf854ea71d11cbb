// Repeats hand-offs with one thread of this machine per CUDA thread, for ThreadSanitizer: the kernels of handoff.cu in
// three concurrent blocks, workers that do what cpu/handoff.py and cpu/lora_workers/worker.py say, and a watchdog.
//
// Fences do nothing, so only acquire and release order memory. Votes of a warp order nothing either, as on a device.
// The argument names an operation that is relaxed, which must be reported. Prints the number of wrong sums.
#include "cuda_types.h"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

constexpr int BLOCKS = 3, THREADS = 8, WORKERS = 3, ROUNDS = 120; // more words of workers than threads
constexpr int ROWS = 6, INPUTS = 28, STRIDE = 32; // three workers' slices of two rows
constexpr unsigned ARRIVED = 7;

static bool counter_relaxed, request_relaxed, done_relaxed, look_relaxed;

struct Place { unsigned thread, block; };
static thread_local Place here;
struct Index { unsigned x; };
static unsigned grid; // of the kernel that runs
#define threadIdx (Index{here.thread})
#define blockIdx (Index{here.block})
#define blockDim (Index{THREADS})
#define gridDim (Index{grid})
#define KERNEL template <int BLOCK> static void // a block has its own instance, and so its own shared memory
#define __shared__ static

static pthread_barrier_t barriers[BLOCKS];
static void __syncthreads() { pthread_barrier_wait(&barriers[here.block]); }
static void __syncwarp() { pthread_barrier_wait(&barriers[here.block]); } // the only warp of its block

static unsigned votes[4]; // of four successive votes: how many threads have voted, times 256, and how many for it
static bool __any_sync(unsigned, bool vote) {
    static thread_local unsigned turn;
    unsigned& word = votes[turn % 4];
    if (here.thread == 0) __atomic_store_n(&votes[(turn + 2) % 4], 0, __ATOMIC_RELAXED);
    turn++;
    __atomic_fetch_add(&word, 256 + vote, __ATOMIC_RELAXED);
    while (__atomic_load_n(&word, __ATOMIC_RELAXED) / 256 < THREADS) sched_yield();
    return __atomic_load_n(&word, __ATOMIC_RELAXED) % 256 != 0;
}
static bool __all_sync(unsigned mask, bool vote) { return !__any_sync(mask, !vote); }

template <class T> static T look(const T* at) {
    return look_relaxed ? __atomic_load_n(at, __ATOMIC_RELAXED) : __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
static void store(long long* at, long long v, bool relaxed) {
    relaxed ? __atomic_store_n(at, v, __ATOMIC_RELAXED) : __atomic_store_n(at, v, __ATOMIC_RELEASE);
}
static long long load_acquire(const long long* at) { return look(at); }
static unsigned load_acquire(const unsigned* at) { return look(at); }
static void store_release(long long* at, long long v) { store(at, v, request_relaxed); }
static void fence_system() {}
static unsigned count_in(unsigned* at) {
    return counter_relaxed ? __atomic_fetch_add(at, 1, __ATOMIC_RELAXED) : __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL);
}
static void nap() { sched_yield(); }

#include "handoff.cu"

// --- memory ---

alignas(128) static char blocks[WORKERS][SLICES + SLICE_BYTES];
alignas(128) static char words[3 * 64]; // status, x_flag and the completion counter, each on its own cache line
alignas(16) static float x[ROWS * STRIDE], host_x[ROWS * STRIDE], deltas[WORKERS][ROWS * STRIDE], y[ROWS * STRIDE];
static long long order_words[(sizeof(WorkOrder) + WORKERS * sizeof(WorkerTask)) / 8];
static i64 asked[WORKERS];
static u32 counter, errors, ready;
static int outcome;
static bool parked[WORKERS], ends;
static i64 number, generation;

static WorkOrder& order() { return *(WorkOrder*)order_words; }
static i64* status_word() { return (i64*)words; }
static i64* x_flag() { return (i64*)(words + 64); }
static i64* y_flag() { return (i64*)(words + 128); }
static i64* block_word(int worker, int at) { return (i64*)(blocks[worker] + at); }
static u64 address(const void* at) { return (u64)(size_t)at; }
template <class T> static T acquire(const T* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
template <class T, class V> static void release(T* at, V v) { __atomic_store_n(at, (T)v, __ATOMIC_RELEASE); }

// --- workers and watchdog: acquire and release as in cpu/lora_workers/worker.py ---

static void count_down(i64* flag) {
    if (__atomic_fetch_add((i64*)((char*)flag + COUNTER_LEFT), -1, __ATOMIC_ACQ_REL) == 1)
        release(flag, acquire((i64*)((char*)flag + COUNTER_VALUE)));
}

static void* work(void* argument) {
    const int worker = (int)(size_t)argument;
    for (i64 seen = 0;;) {
        while (acquire(block_word(worker, REQUEST)) == seen) {
            if (acquire(&ends)) return nullptr;
            sched_yield();
        }
        seen = acquire(block_word(worker, REQUEST));
        const bool is_late = acquire(&parked[worker]);
        while (acquire(&parked[worker])) sched_yield();
        for (i64 index = 0; index < *block_word(worker, COUNT); index++) {
            const i64* slice = block_word(worker, SLICES + (int)index * SLICE_BYTES);
            const float* from = (const float*)slice[SLICE_X];
            float* to = (float*)slice[SLICE_Y];
            // A late worker may find the next layer's x. Its deltas are used by nothing, but are written.
            for (int i = 0; i < slice[SLICE_ROWS] * STRIDE; i++) to[i] = is_late ? -1.0f : 2.0f * from[i];
            i64* flag = (i64*)slice[SLICE_COUNTER];
            __atomic_fetch_add((i64*)((char*)flag + COUNTER_SPENT_NS), 1, __ATOMIC_ACQ_REL);
            count_down(flag);
        }
        store(block_word(worker, DONE), seen, done_relaxed);
    }
}

static void* watch(void*) {
    while (!acquire(&ends)) {
        if (acquire(x_flag()) != acquire(y_flag())) acquire(block_word(0, INCARNATION));
        sched_yield();
    }
    return nullptr;
}

// --- the device: one stream ---

static pthread_barrier_t launched, ended;
static int kernel; // -1: the device stops

template <int BLOCK> static void run() {
    if (kernel == 0)
        handoff_publish<BLOCK>(&order(), x, STRIDE, INPUTS, STRIDE, asked, &counter, &outcome);
    else if (kernel == 1 && BLOCK == 0)
        handoff_wait<BLOCK>(&order(), &outcome, &errors);
    else if (kernel == 2)
        handoff_add<BLOCK>(&order(), &outcome, y, STRIDE, STRIDE, 1, 1, 0, 0, 0, 0, 0, 0, INPUTS, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                           0, 0);
}

static void* device_thread(void* argument) {
    const unsigned index = (unsigned)(size_t)argument;
    here = {index % THREADS, index / THREADS};
    for (;;) {
        pthread_barrier_wait(&launched);
        if (kernel < 0) return nullptr;
        here.block == 0 ? run<0>() : here.block == 1 ? run<1>() : run<2>();
        pthread_barrier_wait(&ended);
    }
}

static void begin(int next) {
    kernel = next;
    grid = next == 1 ? 1 : BLOCKS;
    pthread_barrier_wait(&launched);
}
static int launch(int next) {
    begin(next);
    pthread_barrier_wait(&ended);
    return outcome;
}

// --- the launching thread ---

static void write_order() {
    number++, generation++;
    WorkOrder& made = order();
    memset(order_words, 0, sizeof order_words);
    made.tasks = WORKERS, made.rows = ROWS, made.deadline_ns = 60'000'000'000;
    made.ready = address(&ready), made.ready_generation = ARRIVED;
    made.status = address(status_word()), made.generation = generation;
    made.x_flag = address(x_flag()), made.y_flag = address(y_flag()), made.x = address(host_x);
    for (int worker = 0; worker < WORKERS; worker++) {
        WorkerTask& task = made.task[worker];
        const int rows = ROWS / WORKERS, first = rows * worker;
        float* into = deltas[worker];
        task = {address(blocks[worker]), number, worker, first, rows, address(into), 1, {}};
        task.slice[SLICE_X] = (i64)address(host_x + first * STRIDE);
        task.slice[SLICE_Y] = (i64)address(into);
        task.slice[SLICE_ROWS] = rows;
        task.slice[SLICE_COUNTER] = (i64)address(y_flag());
    }
    for (int i = 0; i < ROWS * STRIDE; i++) x[i] = (float)(number * 1000 + i), y[i] = 1.0f;
}

static int wrong_sums(bool by_workers) {
    int wrong = 0;
    for (int i = 0; i < ROWS * STRIDE; i++) {
        const bool adds = by_workers && i % STRIDE < INPUTS;
        wrong += y[i] != 1.0f + (adds ? 2.0f * x[i] : 0.0f);
    }
    return wrong;
}

static int check(int expected) { return (launch(2) != expected) + wrong_sums(expected == BY_WORKERS); }

static void await_done(int worker) {
    while (acquire(block_word(worker, DONE)) != acquire(block_word(worker, REQUEST))) sched_yield();
}

static int computed_by_workers(bool by_stream) {
    write_order();
    int wrong = launch(0) != BY_WORKERS;
    while (by_stream && acquire(y_flag()) != generation) sched_yield(); // the stream's wait for the word
    wrong += launch(1) != BY_WORKERS;
    return wrong + check(BY_WORKERS);
}

static int arrived_before() {
    write_order();
    release(&ready, ARRIVED);
    const int wrong = (launch(0) != BY_DEVICE) + (launch(1) != BY_DEVICE) + check(BY_DEVICE);
    release(&ready, 0);
    return wrong;
}

// The second worker computes nothing until the weights have arrived, and is not asked for the next layer.
static int arrived_meanwhile() {
    release(&parked[1], true);
    int wrong = 0;
    for (int layer = 0; layer < 2; layer++) {
        write_order();
        wrong += launch(0) != (layer == 0 ? BY_WORKERS : AWAITED);
        begin(1);
        release(&ready, ARRIVED);
        pthread_barrier_wait(&ended);
        wrong += (outcome != BY_DEVICE) + check(BY_DEVICE);
        release(&ready, 0);
        for (int worker : {0, 2}) await_done(worker);
    }
    release(&parked[1], false);
    await_done(1);
    return wrong;
}

static int aborted() {
    write_order();
    release((u32*)status_word(), generation);
    const int wrong = (launch(0) != LOST) + (launch(1) != LOST) + check(LOST);
    errors = 0;
    return wrong;
}

int main(int count, char** arguments) {
    const char* relaxed = count > 1 ? arguments[1] : "";
    counter_relaxed = !strcmp(relaxed, "counter"), request_relaxed = !strcmp(relaxed, "request");
    done_relaxed = !strcmp(relaxed, "done"), look_relaxed = !strcmp(relaxed, "look");
    for (pthread_barrier_t& barrier : barriers) pthread_barrier_init(&barrier, nullptr, THREADS);
    pthread_barrier_init(&launched, nullptr, BLOCKS * THREADS + 1);
    pthread_barrier_init(&ended, nullptr, BLOCKS * THREADS + 1);
    std::vector<pthread_t> threads(BLOCKS * THREADS + WORKERS + 1);
    pthread_t* next = threads.data();
    for (size_t i = 0; i < BLOCKS * THREADS; i++) pthread_create(next++, nullptr, device_thread, (void*)i);
    for (size_t i = 0; i < WORKERS; i++) {
        release(block_word((int)i, INCARNATION), 1);
        pthread_create(next++, nullptr, work, (void*)i);
    }
    pthread_create(next++, nullptr, watch, nullptr);
    int wrong = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const int kind = round % 10;
        wrong += kind == 3 ? arrived_before() : kind == 6 ? arrived_meanwhile() : kind == 9 ? aborted()
               : computed_by_workers(round % 2 == 0);
    }
    release(&ends, true);
    kernel = -1;
    pthread_barrier_wait(&launched);
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    printf("%d wrong\n", wrong);
}
