"""Which instances are in the cluster: connections, heartbeats, messages."""
