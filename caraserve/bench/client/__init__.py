"""The load client: sends a workload to an OpenAI-compatible endpoint on schedule, and records each token's arrival."""
