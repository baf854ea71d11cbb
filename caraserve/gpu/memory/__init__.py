"""Device and host memory: the pool of KV blocks and adapters, copies, results."""
