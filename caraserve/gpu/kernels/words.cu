// The kernels that wait for a word and that copy small arrays.
#include "common.cuh"

// Waits until a wrapping word has reached `value`; used where there are no stream memory operations.
KERNEL __launch_bounds__(32) wait_word(const u32* word, u32 value) {
    while ((int)(load_acquire(word) - value) < 0) nap();
}

// Words from host memory to rows of `width` words that begin `pitch` bytes apart.
struct BlockCopy {
    u64 target;
    u64 source; // a multiple of 16 bytes, readable to a multiple of 16
    i64 words;
    i64 width;
    i64 pitch;
    i64 spare;
};

DEVICE u64 wide(u32 low, u32 high) { return (u64)high << 32 | low; }

// Copies up to 4 words per thread with each block. `copies`: in host memory, [grid].
KERNEL __launch_bounds__(256) scatter_words(const BlockCopy* copies) {
    const uint4* copy = (const uint4*)(copies + blockIdx.x);
    const uint4 places = load_from_host(copy), sizes = load_from_host(copy + 1), rows = load_from_host(copy + 2);
    const u64 target = wide(places.x, places.y), source = wide(places.z, places.w), pitch = wide(rows.x, rows.y);
    const u32 words = sizes.x, width = sizes.z;
    const bool is_whole = width >= words && target % 16 == 0;
    const u32 at = 4 * threadIdx.x; // one load for each thread: a second would wait for the first
    if (at >= words) return;
    const uint4 four = load_from_host((const uint4*)source + threadIdx.x);
    if (is_whole && at + 4 <= words) {
        *(uint4*)(target + 4 * at) = four;
        return;
    }
    const u32 each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 row = (at + i) / width, column = (at + i) % width;
        if (at + i < words) *(u32*)(target + row * pitch + 4 * column) = each[i];
    }
}
