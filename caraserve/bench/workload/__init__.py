"""Workloads: how long requests are, when they arrive, which adapter each asks for; and the papers' settings.

Everything is a function of its arguments and of the generator passed in, except that files named by the user are read.
"""
