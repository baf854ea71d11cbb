// Chooses tokens and computes log-probabilities. One block handles one row of logits at a time. See sampling.py.
#include "common.cuh"

constexpr int MOST_WARPS = 32;
constexpr int WIDTH = 4;       // neighbouring values that a lane reads at once
constexpr int TILE = 32 * WIDTH;
constexpr int AHEAD = 4;       // tiles that a warp has in flight in passes that compute little
constexpr int BINS = 2048;     // of a histogram: 11 bits of a weight
constexpr u32 WEIGHT_BITS = 30; // of weights in [0, 1], as fp32
constexpr float GREEDY_BELOW = 1e-5f;
constexpr float NO_WEIGHT = -1.0f; // in place of NaN: it is below every threshold

// A slot's sampling parameters, as SLOT_SAMPLING in cpu/sampling.py.
struct Record {
    u64 seed;
    i64 prompt_tokens, min_tokens, top_k, adjusts, end_count, bias_count;
    i64 end_ids[MAX_END_IDS], bias_ids[MAX_LOGIT_BIAS];
    float bias[MAX_LOGIT_BIAS], temperature, top_p, min_p, presence, frequency, repetition;
};
static_assert(sizeof(Record) == RECORD_BYTES, "Record is not SLOT_SAMPLING");

struct Shared {
    u64 of_warps[MOST_WARPS];
    u32 low[BINS], high[BINS]; // the sum of each bin: its lower 32 bits, and the bits above
    u64 above;
    u32 digit;
    int drawn;
};

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }

DEVICE u64 shuffle_xor(u64 v, int mask) {
    const u32 low = __shfl_xor_sync(EVERYONE, (u32)v, mask), high = __shfl_xor_sync(EVERYONE, (u32)(v >> 32), mask);
    return (u64)high << 32 | low;
}

DEVICE u64 shuffle(u64 v, int lane) {
    const u32 low = __shfl_sync(EVERYONE, (u32)v, lane), high = __shfl_sync(EVERYONE, (u32)(v >> 32), lane);
    return (u64)high << 32 | low;
}

DEVICE u64 shuffle_up(u64 v, int distance) {
    const u32 low = __shfl_up_sync(EVERYONE, (u32)v, distance);
    return (u64)__shfl_up_sync(EVERYONE, (u32)(v >> 32), distance) << 32 | low;
}

// Combines the values of all threads, always in the same order. `none`: changes no value that it is combined with.
template <class F> DEVICE u64 reduce(u64 v, u64 none, Shared& shared, F both) {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int mask = 16; mask > 0; mask /= 2) v = both(v, shuffle_xor(v, mask));
    __syncthreads(); // all threads have read what is in `of_warps`
    if (lane == 0) shared.of_warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < warps ? shared.of_warps[lane] : none;
    for (int mask = 16; mask > 0; mask /= 2) v = both(v, shuffle_xor(v, mask));
    return v;
}

// Returns the sum over the threads before this one, and in `total` that of all.
DEVICE u64 sum_before(u64 v, Shared& shared, u64& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u64 sum = v, before = 0;
    for (int distance = 1; distance < 32; distance *= 2) {
        const u64 lower = shuffle_up(sum, distance);
        if (lane >= distance) sum += lower;
    }
    __syncthreads();
    if (lane == 31) shared.of_warps[warp] = sum;
    __syncthreads();
    total = 0;
    for (int i = 0; i < warps; i++) {
        if (i == warp) before = total;
        total += shared.of_warps[i];
    }
    return before + sum - v;
}

template <class T> DEVICE bool in_vectors(const T* row) { return (u64)row % (WIDTH * sizeof(T)) == 0; }

template <class T> DEVICE float value_at(const T* row, int at) { return Activation::widen(row[at]); }
DEVICE float value_at(const float* row, int at) { return row[at]; }

// Reads the values first, first + step, …; those from `end` on are -∞.
template <class T> DEVICE void read(const T* row, int first, int step, int end, float (&to)[WIDTH]) {
    if (step == 1 && first + WIDTH <= end) {
        if constexpr (sizeof(T) == sizeof(float))
            Stored<0>::unpack(*(const uint4*)(row + first), to);
        else
            load_four(row + first, to);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const int at = first + i * step;
            to[i] = at < end ? value_at(row, at) : -infinity();
        }
    }
}

// Calls f(values, first, step) in all lanes of a warp for the tiles start, start + stride, … below `end`, which begin at
// multiples of WIDTH. A lane's values have the indices first, first + step, …: neighbours where vectors can be read.
// FLIGHT: tiles that are read before the first is used.
template <int FLIGHT, class T, class F> DEVICE void each_tile(const T* row, int start, int end, int stride, F f) {
    const int lane = threadIdx.x % 32, step = in_vectors(row) ? 1 : 32, place = step == 1 ? lane * WIDTH : lane;
#pragma unroll 1
    for (int tile = start; tile < end; tile += FLIGHT * stride) {
        float values[FLIGHT][WIDTH];
#pragma unroll
        for (int j = 0; j < FLIGHT; j++) read(row, tile + j * stride + place, step, end, values[j]);
#pragma unroll
        for (int j = 0; j < FLIGHT; j++) {
            if (tile + j * stride < end) f(values[j], tile + j * stride + place, step);
        }
    }
}

// Calls f(value, index) for the values of a row; the block's threads share the work.
template <class T, class F> DEVICE void each(const T* row, int end, F f) {
    const auto visit = [&](const float (&values)[WIDTH], int first, int step) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            if (first + i * step < end) f(values[i], first + i * step);
    };
    each_tile<AHEAD>(row, threadIdx.x / 32 * TILE, end, blockDim.x * WIDTH, visit);
}

// Writes f(value, index) of all values of a row to `to`, which may be the row itself.
template <int FLIGHT, class T, class F> DEVICE void rewrite(const T* row, float* to, int end, F f) {
    const auto visit = [&](float (&values)[WIDTH], int first, int step) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            if (first + i * step < end) values[i] = f(values[i], first + i * step);
        if (step == 1 && in_vectors(to) && first + WIDTH <= end) {
            uint4 packed;
            packed.x = __float_as_uint(values[0]), packed.y = __float_as_uint(values[1]);
            packed.z = __float_as_uint(values[2]), packed.w = __float_as_uint(values[3]);
            *(uint4*)(to + first) = packed;
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (first + i * step < end) to[first + i * step] = values[i];
        }
    };
    each_tile<FLIGHT>(row, threadIdx.x / 32 * TILE, end, blockDim.x * WIDTH, visit);
}

// A value and its index as one number: larger for larger values, and for the first of equal ones.
DEVICE u64 ranked(float value, int index) {
    const u32 bits = __float_as_uint(value + 0.0f); // -0 becomes 0
    return (u64)(bits ^ ((int)bits < 0 ? 0xffffffffu : 0x80000000u)) << 32 | ~(u32)index;
}

DEVICE float value_of(u64 rank) {
    const u32 bits = (u32)(rank >> 32);
    return __uint_as_float(bits ^ ((int)bits < 0 ? 0x80000000u : 0xffffffffu));
}

DEVICE int index_of(u64 rank) { return (int)~(u32)rank; }

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The largest value that a thread has met, its first index, and whether all values were finite. NaN is never largest.
struct Best {
    float value;
    int index;
    bool finite;
    DEVICE_MEMBER void meet(float v, int at) {
        if (v > value) value = v, index = at;
        finite = finite && fabsf(v) < infinity(); // false for NaN
    }
    DEVICE_MEMBER void share(Shared& shared) { // with all threads
        const u64 rank = reduce(ranked(value, index), 0, shared, larger);
        value = value_of(rank), index = index_of(rank);
        finite = reduce(finite, 1, shared, [](u64 a, u64 b) { return a & b; }) != 0;
    }
};

template <class T> DEVICE Best best_of(const T* row, int vocab, Shared& shared) {
    Best best = {-infinity(), 0, true};
    each(row, vocab, [&](float v, int at) { best.meet(v, at); });
    best.share(shared);
    return best;
}

// Sets counts to 2 · (times generated) + (in the prompt) for all tokens of the history. Vectors of the prompt, which
// are negative there, count nothing.
DEVICE void tally(int* counts, const int* history, int end, int prompt) {
    for (int at = threadIdx.x; at < end; at += blockDim.x) {
        const int token = history[at];
        if (token < 0) continue;
        if (at < prompt)
            atomicOr(counts + token, 1);
        else
            atomicAdd(counts + token, 2);
    }
}

// Applies penalties, biases, the ban of end tokens and the mask, which may be null.
DEVICE void adjust(const activation* logits, float* adjusted, int* counts, const int* history, int position,
                   const Record& record, const u32* mask, int vocab) {
    const int prompt = (int)record.prompt_tokens, end = position + 1;
    const float repetition = record.repetition, frequency = record.frequency, presence = record.presence;
    tally(counts, history, end, prompt);
    __syncthreads();
    rewrite<1>(logits, adjusted, vocab, [&](float value, int at) {
        const int count = counts[at], generated = count / 2;
        if (count > 0) value = value > 0 ? value / repetition : value * repetition;
        if (generated > 0) value = value - frequency - presence;
        // Subtracts one at a time, as on a CPU: a product would round differently, and greedy choices could differ.
#pragma unroll 1
        for (int times = 1; frequency != 0 && times < generated; times++) value -= frequency;
        if (mask != nullptr && (mask[at >> 5] >> (at & 31) & 1) == 0) value = -infinity(); // biases are finite
        return value;
    });
    __syncthreads();
    for (int at = threadIdx.x; at < end; at += blockDim.x)
        if (history[at] >= 0) counts[history[at]] = 0;
    for (int i = threadIdx.x; i < (int)record.bias_count; i += blockDim.x) adjusted[record.bias_ids[i]] += record.bias[i];
    __syncthreads();
    if (end - prompt < record.min_tokens)
        for (int i = threadIdx.x; i < (int)record.end_count; i += blockDim.x) adjusted[record.end_ids[i]] = -infinity();
    __syncthreads();
}

// Returns ⌊weight · 2^44⌋ by shifts, because some GPUs convert to 64-bit integers slowly.
DEVICE u64 mass_of(u32 weight) {
    const int shift = (int)(weight >> 23) - (127 + 23 - 44);
    const u64 digits = (weight & 0x7fffffu) | 0x800000u;
    return shift >= 0 ? digits << shift : digits >> min(-shift, 63);
}

// Adds to the sum of a bin with 32-bit atomics; shared memory has no 64-bit sums.
DEVICE void add(Shared& shared, u32 bin, u64 value) {
    const u32 low = (u32)value, before = atomicAdd(shared.low + bin, low);
    const u32 high = (u32)(value >> 32) + (before + low < before);
    if (high != 0) atomicAdd(shared.high + bin, high);
}

// Returns the largest t >= floor such that the weights >= t are at least `wanted` in number, or if `by_mass` have at
// least the share `wanted` of the mass of those >= floor; and floor where there are too few. Weights and thresholds are
// bits of fp32, 11 more of which are known after each pass.
DEVICE u32 threshold(const float* weights, int vocab, u32 floor, bool by_mass, double wanted, Shared& shared) {
    const int bins = BINS / blockDim.x, last = BINS - 1 - threadIdx.x * bins; // of this thread: down from `last`
    u64 above = 0; // what the weights with a larger prefix sum to
    u32 prefix = 0;
#pragma unroll 1
    for (int known = WEIGHT_BITS; known > 0;) { // bits below the known prefix
        const int shift = max(known - 11, 0);
        const u32 mask = (1u << (known - shift)) - 1;
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) shared.low[bin] = shared.high[bin] = 0;
        __syncthreads();
        each(weights, vocab, [&](float weight, int) {
            const u32 bits = __float_as_uint(weight);
            if ((int)bits < (int)floor || bits >> known != prefix) return;
            const u32 bin = bits >> shift & mask;
            if (!by_mass)
                atomicAdd(shared.low + bin, 1u);
            else if (const u64 mass = mass_of(bits))
                add(shared, bin, mass);
        });
        __syncthreads();
        const auto sum_of = [&](int bin) { return (u64)shared.high[bin] << 32 | shared.low[bin]; };
        u64 own = 0, total;
#pragma unroll 1
        for (int i = 0; i < bins; i++) own += sum_of(last - i);
        u64 sum = above + sum_before(own, shared, total);
        if (known == WEIGHT_BITS) {
            if (by_mass) wanted = (double)total * wanted;
            wanted = wanted < 1.0 ? 1.0 : wanted; // the best token is always kept
            if ((double)total < wanted) return floor;
        }
        if ((double)sum < wanted && (double)(sum + own) >= wanted) { // in one thread
            int bin = last;
#pragma unroll 1
            for (; (double)(sum + sum_of(bin)) < wanted; bin--) sum += sum_of(bin);
            shared.digit = bin, shared.above = sum;
        }
        __syncthreads();
        prefix = prefix << (known - shift) | shared.digit;
        above = shared.above;
        known = shift;
    }
    return prefix;
}

// Returns the highest 53 of 64 random bits from (seed, position): two rounds of the SplitMix64 finaliser.
DEVICE u64 random_bits(u64 seed, int position) {
    u64 state = seed + ((u64)position + 1) * 0x9E3779B97F4A7C15ull;
    for (int round = 0; round < 2; round++) {
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
        state = (state ^ state >> 27) * 0x94D049BB133111EBull;
        state ^= state >> 31;
    }
    return state >> 11 << 11;
}

// Draws from the weights >= floor: the first token whose mass and that of all before it exceed ⌊uniform · mass⌋.
DEVICE int draw(const float* weights, int vocab, u32 floor, u64 uniform, Shared& shared) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int chunk = (vocab + warps * WIDTH - 1) / (warps * WIDTH) * WIDTH; // each warp sums one chunk of the row
    const auto mass_at = [&](float weight) {
        const u32 bits = __float_as_uint(weight);
        return (int)bits >= (int)floor ? mass_of(bits) : 0;
    };
    u64 mass = 0;
    const auto add_masses = [&](const float (&values)[WIDTH], int, int) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) mass += mass_at(values[i]); // -∞ past the end has none
    };
    each_tile<AHEAD>(weights, warp * chunk, min((warp + 1) * chunk, vocab), TILE, add_masses);
    for (int distance = 16; distance > 0; distance /= 2) mass += shuffle_xor(mass, distance);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.of_warps[warp] = mass;
    if (threadIdx.x == 0) shared.drawn = 0; // if no weight is a number, there is nothing to draw from
    __syncthreads();
    u64 total = 0, before = 0;
    for (int i = 0; i < warps; i++) total += shared.of_warps[i];
    const u64 target = __umul64hi(uniform, total); // ⌊uniform · mass⌋, below mass
    int owner = 0;
    for (; owner < warps && before + shared.of_warps[owner] <= target; owner++) before += shared.of_warps[owner];
    const int end = min((owner + 1) * chunk, vocab);
    for (int start = owner * chunk; start < end && before <= target; start += blockDim.x * WIDTH) {
        const int first = start + threadIdx.x * WIDTH;
        u64 own = 0, passed;
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            if (first + i < end) own += mass_at(weights[first + i]);
        u64 sum = before + sum_before(own, shared, passed);
        if (sum <= target && target < sum + own) { // in one thread
            int at = first;
#pragma unroll 1
            for (; sum + mass_at(weights[at]) <= target; at++) sum += mass_at(weights[at]);
            shared.drawn = at;
        }
        before += passed;
    }
    __syncthreads();
    return shared.drawn;
}

DEVICE float exp_of(float v) { return exp2_approximately(v * 1.4426950408889634f); }

// Writes weights relative to the best token, whose logit is `top`, to `weights`, which may be the row itself.
template <class T> DEVICE void weigh(const T* row, float* weights, float top, float temperature, int vocab) {
    const float inverse = 1.0f / temperature;
    rewrite<2>(row, weights, vocab, [&](float value, int) {
        const float weight = exp_of((value - top) * inverse);
        return weight >= 0.0f ? min(weight, 1.0f) : NO_WEIGHT;
    });
}

// Samples from a row of weights.
DEVICE int sample_from(const float* weights, int position, const Record& record, int vocab, Shared& shared) {
    u32 floor = __float_as_uint(max(record.min_p, 0.0f) + 0.0f);
    const bool has_top_k = record.top_k > 0 && record.top_k < vocab, has_top_p = record.top_p < 1.0f;
#pragma unroll 1
    for (int by_mass = !has_top_k; by_mass <= has_top_p; by_mass++) {
        const double wanted = by_mass ? (double)record.top_p : (double)record.top_k;
        floor = threshold(weights, vocab, floor, by_mass, wanted, shared);
    }
    return draw(weights, vocab, floor, random_bits(record.seed, position), shared);
}

// Each block handles output rows in turn: it draws each token, or looks it up if it is known. With `masked` only the
// rows that it names, without it all others.
KERNEL __launch_bounds__(1024, 1) sample_tokens(
    const activation* logits, int logits_stride, const int* out_token, const int* out_kind, const int* token_slot,
    const int* token_position, const Record* table, int* history, int history_stride, float* weights, int* counts,
    int* chosen, const int* masked, const u32* masks, int mask_stride, int outputs, int vocab) {
    __shared__ Shared shared;
    weights += (i64)blockIdx.x * vocab, counts += (i64)blockIdx.x * vocab;
    for (int number = blockIdx.x; number < outputs; number += gridDim.x) {
        const int output = masked == nullptr ? number : masked[number], token = out_token[output];
        if (token < 0) continue;
        const int kind = out_kind[output], position = token_position[token];
        const int* past = history + (i64)token_slot[token] * history_stride;
        if (masked == nullptr && kind != SAMPLE) { // a masked row has no token until its mask is there
            if (threadIdx.x == 0) chosen[output] = kind == SCORE ? past[position + 1] : NOT_FINITE;
            continue;
        }
        const Record& record = table[token_slot[token]];
        const activation* row = logits + (i64)output * logits_stride;
        const bool adjusts = record.adjusts != 0 || masked != nullptr;
        const Best given = best_of(row, vocab, shared);
        Best best = given;
        if (adjusts) {
            const u32* mask = masked == nullptr ? nullptr : masks + (i64)number * mask_stride;
            adjust(row, weights, counts, past, position, record, mask, vocab);
            best = best_of(weights, vocab, shared);
        }
        int index = best.index;
        if (record.temperature >= GREEDY_BELOW) {
            if (adjusts)
                weigh(weights, weights, best.value, record.temperature, vocab);
            else
                weigh(row, weights, best.value, record.temperature, vocab);
            __syncthreads();
            index = sample_from(weights, position, record, vocab, shared);
        }
        if (threadIdx.x == 0) { // reads the place again: no registers need to keep it
            const int of = out_token[output];
            history[(i64)token_slot[of] * history_stride + token_position[of] + 1] = index; // the next iteration's token
            chosen[output] = given.finite ? index : NOT_FINITE;
        }
        __syncthreads(); // the next row uses the same buffers
    }
}

// Puts a number into a warp's list of the 32 largest, of which lane l holds the one at place l.
DEVICE void insert(u64& kept, u64 rank) {
    const u64 higher = shuffle_up(kept, 1);
    if (rank > kept) kept = threadIdx.x % 32 > 0 && rank > higher ? higher : rank;
}

// Merges the lists of all warps into that of the first. The number of warps is a power of two.
DEVICE void merge(u64& kept, u64 (&lists)[MOST_WARPS][32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    lists[warp][lane] = kept;
    for (int half = blockDim.x / 64; half > 0; half /= 2) {
        __syncthreads();
        if (warp >= half) continue;
        kept = larger(kept, lists[warp + half][31 - lane]); // the 32 largest, in bitonic order
        for (int mask = 16; mask > 0; mask /= 2) {
            const u64 other = shuffle_xor(kept, mask);
            kept = ((lane & mask) == 0) == (other > kept) ? other : kept;
        }
        lists[warp][lane] = kept;
    }
}

// Finds the best values of a row below `ceiling`, up to 32, of which the first `count` matter, and calls f(value, index)
// for all values. Each warp gets a list of those that it has met. `bound` is of the block.
template <class T, class F> DEVICE u64 best_below(u64 ceiling, const T* row, int count, int vocab, u32& bound, F f) {
    u64 kept = ranked(-infinity(), 0), last = kept; // the last of the best `count`
    if (threadIdx.x == 0) bound = 0; // some warp has `count` values that are not below it, as in `ranked`, no index
    __syncthreads();
    const auto meet = [&](const float (&values)[WIDTH], int first, int step) {
        float most = -infinity();
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            if (first + i * step < vocab) f(values[i], first + i * step);
            most = max(most, values[i]);
        }
        const u32 least = max((u32)(last >> 32), *(volatile u32*)&bound);
        if (count == 0 || !__any_sync(EVERYONE, (u32)(ranked(most, 0) >> 32) >= least)) return;
        const u64 before = last;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const u64 rank = ranked(values[i], first + i * step);
            for (u32 left = __ballot_sync(EVERYONE, rank > last && rank < ceiling); left != 0; left &= left - 1)
                insert(kept, shuffle(rank, __ffs((int)left) - 1));
            last = shuffle(kept, count - 1);
        }
        if (threadIdx.x % 32 == 0 && last != before) atomicMax(&bound, (u32)(last >> 32));
    };
    each_tile<2>(row, threadIdx.x / 32 * TILE, vocab, blockDim.x * WIDTH, meet);
    return kept;
}

// Each block scores one row under the unmodified distribution: the token's log-probability and rank, and the best
// `wanted` tokens, of which each pass over the row finds 32.
KERNEL __launch_bounds__(1024, 1) score_tokens(
    const activation* logits, int logits_stride, const int* out_token, const int* wanted, int* chosen, float* logprob,
    int* rank, int* top_ids, float* top_logprobs, int top_row, int top_place, const int* masked, int vocab) {
    __shared__ Shared shared;
    __shared__ u64 lists[MOST_WARPS][32];
    __shared__ u32 bound;
    const int output = masked == nullptr ? blockIdx.x : masked[blockIdx.x];
    const int count = wanted[output], token = chosen[output], lane = threadIdx.x % 32;
    if (out_token[output] < 0 || count < 0 || token < 0) return;
    const activation* row = logits + (i64)output * logits_stride;
    Best best = {-infinity(), 0, true};
    u64 kept = best_below(~0ull, row, min(count, 32), vocab, bound, [&](float v, int at) { best.meet(v, at); });
    best.share(shared);
    const float value = value_at(row, token);
    float total = 0.0f;
    u32 better = 0; // of equal values the first is better
    each(row, vocab, [&](float v, int at) {
        total += exp_of(v - best.value);
        better += v > value || (v == value && at < token);
    });
    const u64 sums = reduce((u64)better << 32 | __float_as_uint(total), 0, shared, [](u64 a, u64 b) {
        return ((a >> 32) + (b >> 32)) << 32 | __float_as_uint(__uint_as_float((u32)a) + __uint_as_float((u32)b));
    });
    const float norm = best.value + logf(__uint_as_float((u32)sums));
    if (threadIdx.x == 0) {
        chosen[output] = best.finite ? token : NOT_FINITE; // also for a token that was known before
        logprob[output] = value - norm, rank[output] = (int)(sums >> 32) + 1;
    }
    for (int first = 0; first < count; first += 32) {
        if (first > 0) {
            __syncthreads(); // all lists are merged
            kept = best_below(lists[0][31], row, min(count - first, 32), vocab, bound, [](float, int) {});
        }
        merge(kept, lists);
        const int at = output * top_row + (first + lane) * top_place;
        if ((int)threadIdx.x < min(count - first, 32))
            top_ids[at] = index_of(kept), top_logprobs[at] = value_of(kept) - norm;
    }
}
