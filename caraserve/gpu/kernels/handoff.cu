// The device's side of a hand-off to CPU LoRA workers: publish x, wait, add the deltas. The words and their writers are
// those of cpu/handoff.py, whose offsets are macros: REQUEST, DONE, INCARNATION, COUNT, SLICES and so on.
//
// All decisions are made when the kernels run, not when they are launched. `publish` hands nothing off if the weights
// have arrived, and makes the layer wait for its weights if no worker is named or one is missing; `wait` ends with the
// deltas or the weights, whichever come first. `outcome`, on the device, is read by the kernels that follow.
//
// Only the work order differs between two chunks, so that a captured graph serves any of them. `wait` occupies one warp;
// a stream memory operation would occupy none, but its address and value are fixed when it is captured.
#include "common.cuh"

constexpr int SLICE_WORDS = SLICE_BYTES / 8;
constexpr int PUBLISH_THREADS = 256; // at least as many as workers
constexpr u32 TURNS = 16; // of `wait` at the workers' words, about 30 µs, to one at the clock and the abort

enum Outcome {
    BY_DEVICE = 0, // the weights have arrived: the layer's LoRA kernels run, and nothing is added
    BY_WORKERS = 1,
    AWAITED = 2,   // no worker computes the layer; its weights are being copied
    LOST = 3,      // neither came in time: the chunk's results are void
};

// One worker's part of a hand-off.
struct WorkerTask {
    u64 block; // the worker's words
    i64 number;
    i64 worker;
    i64 first; // row of x and y
    i64 rows;
    u64 deltas;
    i64 projections; // bit p: the worker computes deltas of projection p
    i64 slice[SLICE_WORDS];
};

// One hand-off, written by the host. All zeros: the adapter has nothing here.
struct WorkOrder {
    i64 tasks;            // 0: no worker is asked
    i64 first;            // first row of x that workers read
    i64 rows;
    i64 deadline_ns;      // from the start of the wait
    u64 ready;            // u32, written by the copy stream (0: the layer needs no weights) …
    i64 ready_generation; // … and its value once the layer's weights are on the device
    u64 status;           // u32 in host memory: the generation that was aborted
    i64 generation;
    u64 x_flag;           // set to the generation when x is in host memory (0: not used); the next word of 64 bits, when
                          // the device goes on without the workers that it asked
    u64 y_flag;           // completion counter: set to the generation by the last worker, or here if no worker is asked
                          // (0: not used)
    u64 x;                // rows of x for the workers, in host memory
    u64 vectors[MOST_SITES]; // factors and biases of each projection, in host memory; 0: the adapter has none
    WorkerTask task[1];
};

DEVICE bool has_arrived(const WorkOrder& order) {
    return order.ready == 0 || load_acquire((const u32*)order.ready) == (u32)order.ready_generation;
}

DEVICE bool is_aborted(const WorkOrder& order) {
    return load_acquire((const u32*)order.status) == (u32)order.generation;
}

DEVICE i64* word(const WorkerTask& task, int offset) { return (i64*)(task.block + offset); }

// What decides whether a worker may be asked.
struct WorkerState {
    i64 incarnation, done, request;
};

// True if the worker is alive and its present process has finished all hand-offs. `asked`: the incarnation last asked.
DEVICE bool is_free(const WorkerState& state, i64 asked) {
    return state.incarnation != 0 && (state.incarnation != asked || state.done == state.request);
}

// Copies x to host memory and signals the workers. `asked`: by worker, the incarnation last asked. `counter` is 0
// between launches.
KERNEL __launch_bounds__(PUBLISH_THREADS) handoff_publish(const WorkOrder* order, const activation* x, int x_stride,
                                                          int inputs, int to_stride, i64* asked, u32* counter,
                                                          int* outcome) {
    __shared__ int arrived, last, missing, aborted;
    __shared__ WorkerState states[PUBLISH_THREADS];
    if (threadIdx.x == 0) arrived = has_arrived(*order);
    __syncthreads();
    // A block that finds the weights arrived does not copy: the last block will find them, too.
    constexpr u32 width = Activation::PER_LOAD;
    const u32 vectors = (inputs + 15) / 16 * 16 / width; // workers read 16 numbers at a time, zeros at the end
    activation* const to = (activation*)order->x;
    const u32 end = arrived ? 0 : (u32)order->rows * vectors; // 32 bits: division by 64 would take longer than the copy
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < end; at += gridDim.x * blockDim.x) {
        const i64 row = order->first + at / vectors;
        const int column = (int)(at % vectors * width);
        float v[width];
        load_many(x + row * x_stride + column, inputs - column, v);
        store_vector(to + row * to_stride + column, v);
    }
    fence_system(); // every thread: its part of x is in host memory
    __syncthreads();
    if (threadIdx.x == 0) {
        last = count_in(counter) == gridDim.x - 1;
        missing = order->tasks == 0;
        arrived = last && has_arrived(*order);
    }
    __syncthreads();
    if (!last) return;
    // A read of host memory takes a round trip over the link, about 1 µs. So a thread reads one word, all at once.
    const u32 tasks = (u32)order->tasks, words = arrived ? 0 : tasks * 3;
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        const int offset = i % 3 == 0 ? INCARNATION : i % 3 == 1 ? DONE : REQUEST;
        ((i64*)states)[i] = load_acquire(word(order->task[i / 3], offset));
    }
    if (threadIdx.x == blockDim.x - 1) aborted = !arrived && is_aborted(*order);
    __syncthreads();
    const bool sends = threadIdx.x < tasks && !arrived && !aborted;
    const WorkerTask& task = order->task[sends ? threadIdx.x : 0];
    if (sends && !is_free(states[threadIdx.x], asked[task.worker])) missing = 1; // all threads write the same value
    const bool asks = !arrived && !aborted;
    if (threadIdx.x == 0 && order->y_flag != 0 && asks) {
        *(i64*)(order->y_flag + COUNTER_LEFT) = order->tasks;
        *(i64*)(order->y_flag + COUNTER_VALUE) = order->generation;
        fence_system();
    }
    __syncthreads();
    // Before the requests: x_flag starts the watchdog's deadline for the workers.
    if (threadIdx.x == 0 && order->x_flag != 0 && asks && !missing)
        store_release((i64*)order->x_flag, order->generation);
    if (sends && !missing) {
        for (int i = 0; i < SLICE_WORDS; i++) word(task, SLICES)[i] = task.slice[i];
        *word(task, COUNT) = 1;
        asked[task.worker] = load_acquire(word(task, INCARNATION)); // again: the process may have been replaced
        store_release(word(task, REQUEST), task.number);
    }
    if (threadIdx.x == 0) {
        *counter = 0;
        *outcome = arrived ? BY_DEVICE : aborted ? LOST : missing ? AWAITED : BY_WORKERS;
        if (order->y_flag != 0 && (missing || !asks)) store_release((i64*)order->y_flag, order->generation);
    }
}

// One warp that waits for the deltas or the weights. Sets a bit of `errors` if neither comes. Dead workers are not
// looked for: their number never comes, but the weights do.
KERNEL __launch_bounds__(32) handoff_wait(const WorkOrder* order, int* outcome, u32* errors) {
    constexpr u32 everyone = 0xffffffffu;
    const u64 start = now_ns();
    int state = *outcome;
    for (u32 turn = 1; state == BY_WORKERS || state == AWAITED; turn++) {
        // Now and then, as each read of host memory delays the others; and before the workers' words: results that are
        // complete by then are used, however late.
        const bool ended = turn % TURNS == 0 && (now_ns() - start > (u64)order->deadline_ns || is_aborted(*order));
        const bool arrived = has_arrived(*order);
        bool done = state == BY_WORKERS;
        for (int i = threadIdx.x; i < order->tasks && state == BY_WORKERS; i += 32)
            done = done && load_acquire(word(order->task[i], DONE)) == order->task[i].number;
        if (__all_sync(everyone, done)) break;
        if (__any_sync(everyone, arrived))
            state = BY_DEVICE;
        else if (__any_sync(everyone, ended))
            state = LOST;
        else
            nap();
    }
    __syncwarp(); // every thread has read `outcome`
    if (threadIdx.x == 0) {
        if (state == BY_DEVICE && *outcome == BY_WORKERS && order->x_flag != 0)
            store_release((i64*)order->x_flag + 1, order->generation);
        *outcome = state;
        if (state == LOST) *errors |= 1;
    }
}

// y += deltas, then y · factor + bias if there are vectors; nothing unless the workers computed the deltas. Widths and
// columns count numbers. `fours`: not 0: four columns of y are written at once.
KERNEL __launch_bounds__(256) handoff_add(const WorkOrder* order, const int* outcome, activation* y, int y_stride,
                                          int delta_stride, int projections, int fours, int column0, int column1,
                                          int column2, int column3, int column4, int column5, int outputs0,
                                          int outputs1, int outputs2, int outputs3, int outputs4, int outputs5,
                                          int delta0, int delta1, int delta2, int delta3, int delta4, int delta5) {
    if (*outcome != BY_WORKERS) return;
    for (i64 index = blockIdx.x; index < order->rows; index += gridDim.x) {
        const i64 row = order->first + index;
        for (int i = 0; i < order->tasks; i++) {
            const WorkerTask& task = order->task[i];
            if (row < task.first || row >= task.first + task.rows) continue;
            const activation* deltas = (const activation*)task.deltas + (row - task.first) * delta_stride;
            for (int p = 0; p < projections; p++) {
                if ((task.projections >> p & 1) == 0) continue;
                const int outputs = choose(p, outputs0, outputs1, outputs2, outputs3, outputs4, outputs5);
                const activation* from = deltas + choose(p, delta0, delta1, delta2, delta3, delta4, delta5);
                activation* at = y + row * y_stride + choose(p, column0, column1, column2, column3, column4, column5);
                const float* factors = (const float*)order->vectors[p];
                const float* biases = biases_after(factors, outputs);
                constexpr int step = Activation::PER_LOAD;
                for (int column = threadIdx.x * step; column < outputs; column += blockDim.x * step) {
                    float delta[step], v[4];
                    Activation::unpack(load_from_host(from + column), delta);
#pragma unroll
                    for (int four = 0; four < step; four += 4) {
                        const int left = outputs - column - four;
                        if (left <= 0) break; // the next projection's columns
                        if (fours)
                            load_four(at + column + four, v);
                        else
                            load_few(at + column + four, left, v);
#pragma unroll
                        for (int i = 0; i < 4; i++) v[i] += delta[four + i];
                        if (factors != nullptr) {
                            float factor[4], bias[4];
                            Stored<0>::unpack(load_from_host(factors + column + four), factor);
                            Stored<0>::unpack(load_from_host(biases + column + four), bias);
                            apply_vectors(factor, bias, v);
                        }
                        if (fours)
                            store_four(at + column + four, v);
                        else
                            store_few(at + column + four, left, v);
                    }
                }
            }
        }
    }
}
