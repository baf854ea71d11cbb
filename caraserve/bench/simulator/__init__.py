"""A simulated cluster: the server's own cost, placement and routing functions under a virtual clock.

In the order of a simulated request: `machines` (times and sizes of an instance), `simulation` (the events), `views`
(what a router knows), `adapter_cache`, `instance` (its batches), `placement`; then `result`, `sweep` (many runs) and
`report`. `command` is `caraserve bench cluster`.
"""
