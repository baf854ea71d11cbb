"""Chooses the instance that answers a request. `http/dispatch` forwards it there, and counts and signs the one hop.

`selector` applies a policy of `policies`, which predicts times by `cost` and `perf_model` from `fleet_view`; `router`
has the data and rules that the simulator shares; `forward_auth` says who may forward.
"""
