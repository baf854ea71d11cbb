// Moves of bytes on the device: keys and values into their blocks, adapters within the pool.
#include "common.cuh"

// One token's keys and values each take `vectors` × 16 bytes. The cache is [block, layer, 2, block_tokens, vectors];
// `layer_at` is the layer's first vector in block 0. places[token]: block · block_tokens + place in it; -1: nowhere.
KERNEL __launch_bounds__(256) kv_append(const u8* keys, const u8* values, i64 stride, const i64* places, int tokens,
                                        int vectors, int block_tokens, i64 block_vectors, i64 layer_at, uint4* cache) {
    const u32 end = (u32)tokens * 2 * vectors; // 32 bits: division by 64 would take longer than the copy
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < end; at += gridDim.x * blockDim.x) {
        const u32 piece = at / (u32)vectors, token = piece / 2, half = piece % 2, vector = at % (u32)vectors;
        const i64 place = places[token];
        if (place < 0) continue;
        const u8* from = (half ? values : keys) + (i64)token * stride + vector * 16;
        const i64 in_layer = ((i64)half * block_tokens + place % block_tokens) * vectors + vector;
        cache[place / block_tokens * block_vectors + layer_at + in_layer] = *(const uint4*)from;
    }
}

// A rectangle of bytes, less than 64 GiB; all but the rows are multiples of 16. Source 0: zeros. No move of a launch may
// write what another one of it, or itself, reads.
struct Move {
    u64 target;
    i64 target_pitch;
    u64 source;
    i64 source_pitch;
    i64 width;
    i64 rows;
};

KERNEL __launch_bounds__(256) pool_move(const Move* moves, const int* count) {
    for (int i = 0; i < *count; i++) {
        const Move move = moves[i];
        const u32 vectors = (u32)(move.width / 16), end = vectors * (u32)move.rows;
        for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < end; at += gridDim.x * blockDim.x) {
            const i64 row = at / vectors, offset = (i64)(at % vectors) * 16;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (move.source != 0) v = load_weights((const u8*)move.source + row * move.source_pitch + offset);
            *(uint4*)(move.target + row * move.target_pitch + offset) = v;
        }
    }
}

// Until a word that counts round is at `value` or beyond it: what a stream memory operation does, where there is none.
KERNEL __launch_bounds__(32) wait_word(const u32* word, u32 value) {
    while ((int)(load_acquire(word) - value) < 0) nap();
}
