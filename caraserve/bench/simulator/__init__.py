"""A simulated fleet: the cost, placement and routing functions that serve, under a virtual clock.

In the order of a simulated request: `machines` (what an instance is), `simulation` (the events, by time), `views` (what
gossip lets a router see), `cache` (where an instance has its adapters), `instance` (its batches); then `outcome` (what
came of it), `scenarios` (the papers' settings), `sweep` (many runs), `report`; `run` is the command.
"""
