"""What each pod of a job runs, one module per role, and the commands that run parts of it outside a job.

Nothing imports this package but the entry point; it may import all the others.
"""
