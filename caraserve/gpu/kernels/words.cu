// The kernel that waits for a word.
#include "common.cuh"

// Waits until a wrapping word has reached `value`; used where there are no stream memory operations.
KERNEL __launch_bounds__(32) wait_word(const u32* word, u32 value) {
    while ((int)(load_acquire(word) - value) < 0) nap();
}
