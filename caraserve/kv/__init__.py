"""Paged KV: `block_pool` (blocks: free, held, reusable by keys), `memory_budget` (beside adapters)."""
