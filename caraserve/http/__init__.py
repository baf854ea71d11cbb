"""OpenAI-compatible HTTP over aiohttp."""
