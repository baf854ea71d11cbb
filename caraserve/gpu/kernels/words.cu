// Words that the device waits for.
#include "common.cuh"

// Until a word that counts round is at `value` or beyond it: what a stream memory operation does, where there is none.
KERNEL __launch_bounds__(32) wait_word(const u32* word, u32 value) {
    while ((int)(load_acquire(word) - value) < 0) nap();
}
