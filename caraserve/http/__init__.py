"""HTTP over aiohttp. `app` makes the server of the routes in `operations`; a request for text passes through these:

`server` and `access/` (connection, client and its limits, adapter), `body/` (JSON and fields), `apis/` (one module for
each API: prompt and parameters), `dispatch` (this instance or another; `proxy`), `generation` (the engine's requests),
`streaming` and `whole_answer`. `management/` has what operators use. Each part imports only from those that
`tests/test_architecture.py` lists below it.
"""
