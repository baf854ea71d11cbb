"""HTTP over aiohttp. `app` has the routes; a request for text passes through these modules:

`server` and `access/` (connection, client and its limits, adapter), `json_reader`, `request_schema` and `validation`
(body), `apis/` (one module for each API: prompt and parameters), `dispatch` (this instance or another; `proxy`),
`generation` (the engine's requests), `streaming` and `whole_answer`. `management/` has what operators use.
"""
