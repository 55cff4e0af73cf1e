"""Rehearses a job: the real trainer tries it on a scaled-down model in under a minute, on two CPU ranks."""
