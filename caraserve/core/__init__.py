"""The data that the engine, the backends and the cluster exchange: requests, batches, protocols, profiles."""
