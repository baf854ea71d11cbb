"""`caraserve bench`: workloads, load client, measurements and reports."""
