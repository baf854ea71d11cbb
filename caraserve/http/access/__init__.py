"""Who sends a request: keys and limits (`auth`, `api_keys`, `rate_limits`), and the adapters that they may use."""
