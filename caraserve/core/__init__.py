"""What passes between the engine, the backends and the cluster: requests, batches, protocols, profiles. No I/O."""
