"""The engine's parts: request queues, the scheduler, execution, statistics."""
