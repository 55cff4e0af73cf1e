"""The programs of a job's pods, one module per role, and the commands that run parts of them outside a job.

Only the entry point imports this package; it may import all the others.
"""
