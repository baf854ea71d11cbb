"""Paged KV: `block_pool` (blocks: free, held, reusable), `prefix_keys` (reuse), `memory_budget` (beside adapters)."""
