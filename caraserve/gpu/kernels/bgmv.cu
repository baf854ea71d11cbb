// LoRA of decode: y += scale · (x Aᵀ) B for rows of many adapters, each at its own rank, and y · factor + bias for
// adapters with vectors. See bgmv_work.py for the items.
//
// Two launches serve all projections that read the same x. A grid of any size walks a list of items of equal bytes; the
// list, its length and the tables of weights are read on the device, so that one captured graph serves any batch.
// K is always cut into four planes and every sum has one order, whatever else is in the batch: no atomics, nothing to
// zero, and a row's bits depend on its own x and adapter alone. core/lora_layout.py defines the layout of weights.
//
// Expand adds to y, or leaves its sums apart, for a kernel that reads y later and adds them as expand would
// (kernels/lora_sums.py): then it need not wait for y.
//
// From compute capability 9.0 on, blocks of expand begin as those of shrink end. Until shrink has ended they read only
// what no kernel writes meanwhile: items, tables and weights.
//
// Parts of one module are projections that share A, by which shrink multiplies for each of them: six products for a
// fused q, k and v, where four would do.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int PLANES = 4;
constexpr int ROWS = 4;       // rows of one adapter that share a read of its weights
constexpr int LOADS = 8;      // 16-byte loads that a thread has in flight
constexpr int MAX_RANK = 512;
constexpr int A_COLUMNS = 16; // a row of A is padded to a multiple

struct Item {
    int slot;
    int place; // projection in the lowest byte, above it the group of rows
    int first; // shrink: rank row; expand: 16-byte vector of a row of B
    int count; // shrink: plane of K; expand: vectors
};

struct Group {
    int count;
    int rank; // most rank rows that the batch computes, of those that an adapter has
    int spare[2];
    int row[ROWS];
};

// Tables of one group of projections: [projections, slots], the dtype [slots]. Rank 0: nothing to do.
struct Tables {
    const u64* address;
    const int* rank;
    const int* dtype;
    int slots;
};

DEVICE int stored_rank(const Tables& tables, const Item& item) {
    return (tables.rank[(item.place & 0xff) * tables.slots + item.slot] + 7) / 8 * 8;
}

// Sums N values over a warp. In each step a lane passes half of its values on, until one is left; afterwards lane l
// holds the sum of value ⌊l · N / 32⌋. The tree of sums is the same for every value and lane.
template <int N> DEVICE float fold(float (&value)[N], int lane) {
    int offset = 16;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        const bool upper = (lane & offset) != 0;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float sent = upper ? value[i] : value[i + half];
            const float kept = upper ? value[i + half] : value[i];
            value[i] = kept + __shfl_xor_sync(EVERYONE, sent, offset);
        }
        offset /= 2;
    }
    float sum = value[0];
#pragma unroll
    for (int left = 16 / N; left > 0; left /= 2) sum += __shfl_xor_sync(EVERYONE, sum, left);
    return sum;
}

// One plane of K for a few rank rows: two to a warp (one of fp32, whose rows are twice as long).
template <int WEIGHT>
DEVICE void shrink_item(const Item& item, const Group& group, const u8* a, const activation* x, i64 x_stride,
                        int inputs, float* to, i64 to_stride) {
    typedef Stored<WEIGHT> Weight;
    constexpr int WIDTH = Weight::PER_LOAD, RANKS = WIDTH / 4, AHEAD = LOADS / RANKS;
    const int lane = threadIdx.x % 32, rows = group.count;
    const int first = item.first + threadIdx.x / 32 * RANKS;
    const int vectors = (inputs + A_COLUMNS - 1) / A_COLUMNS * A_COLUMNS / WIDTH;
    const int plane = (vectors + PLANES - 1) / PLANES;
    const int start = item.count * plane, end = min(start + plane, vectors);
    a += (i64)first * vectors * 16;
    float sum[RANKS * ROWS];
#pragma unroll
    for (int i = 0; i < RANKS * ROWS; i++) sum[i] = 0.0f;
    for (int at = start + lane; at < end; at += 32 * AHEAD) {
        uint4 weights[AHEAD][RANKS];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
#pragma unroll
            for (int r = 0; r < RANKS; r++) {
                weights[j][r] = make_uint4(0, 0, 0, 0);
                if (at + 32 * j < end) weights[j][r] = load_weights(a + ((i64)r * vectors + at + 32 * j) * 16);
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int column = (at + 32 * j) * WIDTH;
            if (at + 32 * j >= end) break;
            float w[RANKS][WIDTH];
#pragma unroll
            for (int r = 0; r < RANKS; r++) Weight::unpack(weights[j][r], w[r]);
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                if (m >= rows) break;
                float v[WIDTH];
                load_many(x + group.row[m] * x_stride + column, inputs - column, v);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) {
#pragma unroll
                    for (int r = 0; r < RANKS; r++) sum[r * ROWS + m] = fmaf(v[i], w[r][i], sum[r * ROWS + m]);
                }
            }
        }
    }
    const float total = fold(sum, lane);
    constexpr int HOLDERS = 32 / (RANKS * ROWS);
    const int value = lane / HOLDERS, m = value % ROWS;
    if (lane % HOLDERS == 0 && m < rows) {
        to[item.count * to_stride + first + value / ROWS] = total;
    }
}

// part[plane, row, projection, rank] = x[row, K of the plane] · A[rank, K of the plane]
KERNEL __launch_bounds__(THREADS, 5) bgmv_shrink(
    const u64* a_table, const int* rank_table, const int* dtype_table, int slots, const Item* items,
    const int* item_count, const Group* groups, const activation* x, int x_stride, int inputs, float* part,
    int part_rows, int projections, int max_rank) {
    const Tables tables = {a_table, rank_table, dtype_table, slots};
    const int lane = threadIdx.x % 32;
    admit_next_kernel();
    for (int at = blockIdx.x; at < *item_count; at += gridDim.x) {
        const Item item = items[at];
        const Group group = groups[item.place >> 8];
        const int dtype = tables.dtype[item.slot], projection = item.place & 0xff;
        if (item.first >= min(stored_rank(tables, item), group.rank)) continue;
        const u8* a = (const u8*)tables.address[projection * slots + item.slot];
        const i64 plane = (i64)part_rows * projections * max_rank;
        const int m = dtype == 0 ? lane / 8 % ROWS : lane / 4 % ROWS; // the row whose sum this lane holds after `fold`
        // Reads the row's number from memory again: registers cannot be indexed by lane.
        float* to = part + ((i64)groups[item.place >> 8].row[m] * projections + projection) * max_rank;
        if (dtype == 0)
            shrink_item<0>(item, group, a, x, x_stride, inputs, to, plane);
        else if (dtype == 1)
            shrink_item<1>(item, group, a, x, x_stride, inputs, to, plane);
        else
            shrink_item<2>(item, group, a, x, x_stride, inputs, to, plane);
    }
}

// Columns of a projection's outputs in a row of y, and what becomes of their sums.
struct Target {
    typedef activation type;
    int column;
    int outputs;
    float scale;
    const float* vectors; // factors of the outputs, padded to panels, then biases; null: the adapter has none
    int fours; // not 0: four columns are written at once, see `Projections` in cuda_launch.py

    // Adds the sums of four columns, of which y has `left`, from `at` on.
    DEVICE_MEMBER void put(activation* to, int at, int left, const float (&total)[4]) const {
        float v[4];
        if (fours)
            load_four(to, v);
        else
            load_few(to, left, v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fmaf(scale, total[i], v[i]);
        if (vectors != nullptr) apply_vectors(vectors + at, biases_after(vectors + at, outputs), v);
        if (fours)
            store_four(to, v);
        else
            store_few(to, left, v);
    }
};

// The same in a row of sums, in which each projection begins at a panel and has whole ones.
struct Apart {
    typedef float type;
    int column;
    int outputs;

    DEVICE_MEMBER void put(float* to, int, int, const float (&total)[4]) const {
        *(uint4*)to = make_uint4(__float_as_uint(total[0]), __float_as_uint(total[1]), __float_as_uint(total[2]),
                                 __float_as_uint(total[3]));
    }
};

// Computes a run of columns at the first `rank` of `stored` ranks. A thread reads one vector of eight rank rows; groups
// of eight are summed in shared memory, in order. `row_numbers`: the group's rows in memory, which can be indexed at run
// time.
template <int WEIGHT, typename TARGET>
DEVICE void expand_item(const Item& item, const Group& group_rows, const int* row_numbers, const u8* b, int stored,
                        int rank, const float* part, i64 part_plane, int part_stride, typename TARGET::type* y,
                        i64 y_stride, const TARGET& target, float (&shrunk)[ROWS * MAX_RANK],
                        float (&sums)[THREADS * 8]) {
    typedef Stored<WEIGHT> Weight;
    constexpr int WIDTH = Weight::PER_LOAD, PANEL_VECTORS = PANEL / WIDTH;
    const int rows = group_rows.count, groups = rank / 8;
    const int group = threadIdx.x / item.count, vector = item.first + threadIdx.x % item.count;
    const bool active = group < groups;
    uint4 weights[LOADS];
    b += (((i64)(vector / PANEL_VECTORS) * stored + group * 8) * PANEL_VECTORS + vector % PANEL_VECTORS) * 16;
#pragma unroll
    for (int k = 0; k < LOADS; k++) {
        weights[k] = make_uint4(0, 0, 0, 0);
        if (active) weights[k] = load_weights(b + k * PANEL_VECTORS * 16);
    }
    await_previous_kernel();
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        if (m >= rows) break;
        const float* planes = part + (i64)group_rows.row[m] * part_stride;
        for (int r = threadIdx.x; r < rank; r += THREADS) {
            float sum = planes[r];
#pragma unroll
            for (int plane = 1; plane < PLANES; plane++) sum += planes[plane * part_plane + r];
            shrunk[m * rank + r] = sum;
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < rows; m++) {
        if (m > 0) __syncthreads(); // all threads have read the previous row from `sums`
        if (active) {
            float sum[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] = 0.0f;
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                const float v = shrunk[m * rank + group * 8 + k];
                float w[WIDTH];
                Weight::unpack(weights[k], w);
#pragma unroll
                for (int i = 0; i < WIDTH; i++) sum[i] = fmaf(v, w[i], sum[i]);
            }
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sums[threadIdx.x * WIDTH + i] = sum[i];
        }
        __syncthreads(); // from here on `shrunk` is the next item's, whose first barrier frees `sums`
        const int width = item.count * WIDTH, from = item.first * WIDTH;
        typename TARGET::type* row = y + row_numbers[m] * y_stride + target.column + from;
        for (int column = threadIdx.x * 4; column < width; column += THREADS * 4) {
            float total[4];
#pragma unroll
            for (int i = 0; i < 4; i++) total[i] = sums[column + i];
            for (int g = 1; g < groups; g++) {
#pragma unroll
                for (int i = 0; i < 4; i++) total[i] += sums[g * width + column + i];
            }
            const int left = target.outputs - from - column;
            if (left <= 0) break; // the rest of a panel; B is zero up to the next four
            target.put(row + column, from + column, left, total);
        }
    }
}

// Walks the items of expand. `target_of(projection, slot)`: where a projection's outputs go.
template <typename TARGET, typename TARGET_OF>
DEVICE void expand(const Tables& tables, const Item* items, const int* item_count, const Group* groups,
                   const float* part, int part_rows, int projections, int max_rank, typename TARGET::type* y,
                   int y_stride, const TARGET_OF& target_of) {
    __shared__ __align__(16) float shrunk[ROWS * MAX_RANK];
    __shared__ __align__(16) float sums[THREADS * 8];
    for (int at = blockIdx.x; at < *item_count; at += gridDim.x) {
        const Item item = items[at];
        const Group group = groups[item.place >> 8];
        const int stored = stored_rank(tables, item), rank = min(stored, group.rank);
        const int dtype = tables.dtype[item.slot], projection = item.place & 0xff;
        if (rank == 0) continue;
        const u8* b = (const u8*)tables.address[projection * tables.slots + item.slot];
        const TARGET target = target_of(projection, projection * tables.slots + item.slot);
        const int part_stride = projections * max_rank, *row_numbers = groups[item.place >> 8].row;
        const float* from = part + projection * max_rank;
        const i64 plane = (i64)part_rows * part_stride;
        if (dtype == 0)
            expand_item<0>(item, group, row_numbers, b, stored, rank, from, plane, part_stride, y, y_stride, target, shrunk,
                           sums);
        else if (dtype == 1)
            expand_item<1>(item, group, row_numbers, b, stored, rank, from, plane, part_stride, y, y_stride, target, shrunk,
                           sums);
        else
            expand_item<2>(item, group, row_numbers, b, stored, rank, from, plane, part_stride, y, y_stride, target, shrunk,
                           sums);
    }
    await_previous_kernel(); // blocks without items, too: what follows waits for this kernel alone
}

// y[row, columns of the projection] += scale · (Σ planes of part) B, then y = y · factor + bias if there are vectors
KERNEL __launch_bounds__(THREADS, 5) bgmv_expand(
    const u64* b_table, const int* rank_table, const int* dtype_table, const float* scale_table,
    const u64* vectors_table, int slots, const Item* items, const int* item_count, const Group* groups,
    const float* part, int part_rows, int projections, int max_rank, activation* y, int y_stride, int fours,
    int column0, int column1, int column2, int column3, int column4, int column5, int outputs0, int outputs1,
    int outputs2, int outputs3, int outputs4, int outputs5) {
    const auto target_of = [=](int projection, int entry) {
        return Target{choose(projection, column0, column1, column2, column3, column4, column5),
                      choose(projection, outputs0, outputs1, outputs2, outputs3, outputs4, outputs5),
                      scale_table[entry], (const float*)vectors_table[entry], fours};
    };
    expand<Target>({b_table, rank_table, dtype_table, slots}, items, item_count, groups, part, part_rows, projections,
                   max_rank, y, y_stride, target_of);
}

// apart[row, columns of the projection] = (Σ planes of part) B
KERNEL __launch_bounds__(THREADS, 5) bgmv_expand_apart(
    const u64* b_table, const int* rank_table, const int* dtype_table, int slots, const Item* items,
    const int* item_count, const Group* groups, const float* part, int part_rows, int projections, int max_rank,
    float* apart, int apart_stride, int column0, int column1, int column2, int column3, int column4, int column5,
    int outputs0, int outputs1, int outputs2, int outputs3, int outputs4, int outputs5) {
    const auto target_of = [=](int projection, int) {
        return Apart{choose(projection, column0, column1, column2, column3, column4, column5),
                     choose(projection, outputs0, outputs1, outputs2, outputs3, outputs4, outputs5)};
    };
    expand<Apart>({b_table, rank_table, dtype_table, slots}, items, item_count, groups, part, part_rows, projections,
                  max_rank, apart, apart_stride, target_of);
}
