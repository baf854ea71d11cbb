"""`caraserve bench`: workloads, load client, measurements and reports. Level 5."""
