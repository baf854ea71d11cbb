"""Workloads: lengths, arrival times and adapters of requests, and the papers' experimental settings.

Results depend only on the arguments, the random generator passed in, and the files that the user names.
"""
