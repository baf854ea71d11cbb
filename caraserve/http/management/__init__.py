"""Routes for operators: models, adapters and aliases (`admin`, `adapters`, `aliases`), state, and the web page."""
