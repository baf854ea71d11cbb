"""HTTP over aiohttp. `app` has the routes; a request for text passes through these modules:

`server` and `auth` (connection, client), `json_reader`, `request_schema` and `validation` (body), one module for each
API (`completions`, `chat`, `openai_responses`, `anthropic_messages`, `embeddings`, `scores`), `rate_limits` (a
tenant's 429), `dispatch` (this instance or another; `proxy`), `generation` (the engine's requests), `streaming` and
`whole_answer`.
"""
