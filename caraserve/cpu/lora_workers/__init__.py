"""CPU LoRA workers: forked processes that compute x A B in shared memory."""
