"""A simulated cluster: the server's own cost and placement functions under a virtual clock.

Shared with the server: in `cluster/routing` cost, perf_model and policy_rules, which are compiled here, in
`cluster/placement` loraserve, plan, migration and bin_packing, and `core/machine_profile`. Batching and loading are
models of the server's own.

Modules, in the order in which a simulated request meets them: `setting` (times and sizes of an instance too),
`simulation` (Python around the compiled code, and the placement), `events` (its loop), `fleet` and `compiled` (its
arrays), `views` (the state that routers see), `routing`, `adapter_cache`, `batching`; then `sweep` (results of many
runs). `command` is `caraserve bench cluster`.
"""
