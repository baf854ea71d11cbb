"""The parts of the engine. `Engine` itself, with its loop and the end of every request, is in `caraserve/loop.py`.

Modules, in the order in which a request meets them: `queues` (admission, and when a cold request starts),
`slot_allocator` (slots and KV blocks: taken, reused, released), `scheduler` (the rows of an iteration), `executor` and
`side_batches` (launches), `batch_launcher`, `active_request` (the state and the tokens of one request; its stream,
which a client that leaves cancels). `stats` and `batch_timeline` are for monitoring. Whose turn it is decides
`core/fair_queue.py`.
"""
