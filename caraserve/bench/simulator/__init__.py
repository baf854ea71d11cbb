"""A simulated cluster: the server's own cost, placement and routing functions under a virtual clock.

Modules, in the order in which a simulated request meets them: `machines` (times and sizes of an instance), `simulation`
(events), `views` (the state that routers see), `adapter_cache`, `instance` (batches), `placement`; then `result`,
`sweep` (many runs) and `report`. `command` is `caraserve bench cluster`.
"""
