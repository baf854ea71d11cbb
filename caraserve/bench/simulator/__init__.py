"""A simulated cluster: the server's own cost, placement and routing functions under a virtual clock.

Shared with the server: in `cluster/routing` cost, perf_model, policies and router, in `cluster/placement` loraserve,
plan, migration and bin_packing, and `core/machine_profile`. Batching and loading are models of the server's own.

Modules, in the order in which a simulated request meets them: `machines` (times and sizes of an instance), `simulation`
(events), `views` (the state that routers see), `adapter_cache`, `instance` (batches), `placement`; then `sweep`
(results of many runs) and `report`. `command` is `caraserve bench cluster`.
"""
