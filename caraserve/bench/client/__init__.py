"""The load client: sends a workload to any OpenAI-compatible endpoint, on time, and notes what came back when."""
